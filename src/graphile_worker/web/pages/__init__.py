"""The pages of the dashboard, rendered on the server: they and all their forms work without JavaScript.

`routes` lists the addresses. `rendering` makes a response from a template, and knows what to show if the
database is away. `formatting` writes numbers and times, `forms` reads what browsers send. Each other module
has the pages of one subject. Pages read through `QueueData` and change through `Operations`, as the API does.
They know neither SQL nor the database's driver.
"""
