"""The JSON API, under ``/api/v1``: the same reads and changes as the pages.

`routes` declares each endpoint once: its query, its body, its response. `openapi` describes them from these
declarations, `parameters` has their values, and `responses` makes the answers. Endpoints only call
`QueueData` and `Operations`.
"""
