"""Sets Django up when it is imported: the first thing that a process for tasks does."""

import django

django.setup()
