"""Integrations with web frameworks and migration tools.

Each package here belongs to one of them, and users import it by its name, for example
``graphile_worker.contrib.django``. Nothing is loaded that is not used. The integrations stand at the top:
they may use the whole library, the command too, and nothing else imports them.
"""
