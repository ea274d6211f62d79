"""A chaos test: inject faults while workers run jobs, and audit the outcome of every job."""
