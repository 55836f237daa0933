"""Where a Monitor may send what it sees, beside its own log.

Each sink imports its client when it is made. What a client holds back, loses or cannot hold is in
the docstring of its sink; the log (`JSONL`) alone has every record whole.
"""
