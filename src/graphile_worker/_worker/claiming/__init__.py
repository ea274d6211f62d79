"""Claiming: which jobs to request from the database, when, and what to do when it does not answer.

`ClaimPlanner` decides how many jobs of which tasks to claim, and when. It is a state machine without I/O.
`ClaimLimiter` and `ForbiddenFlags` tell it what middleware and options allow. `ExchangeClient` sends the
exchange on its own connection. After that connection was lost, `reconcile` compares the jobs that the worker
knows with the locks in the database. `Refusals` decides how to repeat an exchange that the server refused,
and `OutageTracker` when to try again after an outage.

The worker's loop is the only caller. Nothing here runs a job or knows a task's function.
"""
