"""Recurring tasks: crontabs, patterns, and the minutes at which they are due.

The worker's cron scheduler and the command line call this package. It does not access the database, and
callers pass in the times to check.
"""

from graphile_worker.cron.builder import Cron
from graphile_worker.cron.crontab import format_crontab, parse_crontab
from graphile_worker.cron.item import CronItem, parse_cron_items

__all__ = ["Cron", "CronItem", "format_crontab", "parse_cron_items", "parse_crontab"]
