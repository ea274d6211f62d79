"""The live view of a queue, for ``graphile-worker top``.

`loop` refreshes the view until the user quits. `snapshot` reads the queue; `view` draws the screen and
handles keys; `tabs` declares the tables, `details` shows one job, and `layout` fits texts to the terminal.
`terminal` reads the keyboard, and restores the terminal at the end. Only the verbs import this package, when
they are called, because it needs rich.
"""
