"""Gradients of several processes."""
