"""How fast it is, beside others: `make bench`, `make bench-scaling`."""
