"""The case table, a float64 reference and the tolerances, for the tests and `fastclip check`."""
