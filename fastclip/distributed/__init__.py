"""Gradients that several processes hold, by torch.distributed. Nothing here is imported before a
DTensor over more than one process or a process group is met.
"""
