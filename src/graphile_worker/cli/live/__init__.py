"""A live view of a queue, for ``graphile-worker top``.

`loop` looks at the queue again and again and shows it; `view` is what is shown, `tabs` the tables in it,
`details` one job, and `layout` fits texts to the terminal. `terminal` is the keyboard and the screen, which
are left as they were.
"""
