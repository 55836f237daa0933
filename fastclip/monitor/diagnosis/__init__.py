"""The incident playbook over a log: symptom, boundary, interventions, checks.

`diagnose` goes once through the log (`gathering`, with a Monitor and one more detector,
`excursions`), decides by the table (`table`), and gives a `Diagnosis` (`result`), whose str() is a
page (`page`). `baseline` compares the log with that of another run on the way.
"""
