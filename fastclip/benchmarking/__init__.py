"""What is measured, and how: for `fastclip bench` anywhere, and for the suite in benchmarks/."""
