"""One typed function for each statement, grouped by subject.

The client, the worker, recovery and the doctor call these functions with a connection and a `Schema`. The
functions return plain values. They decide nothing about retries or scheduling, and open no connections.
"""
