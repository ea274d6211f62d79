"""Recurring tasks: when they are due. Nothing here does anything: no I/O, and no clock."""

from graphile_worker.cron.builder import Cron
from graphile_worker.cron.crontab import format_crontab, parse_crontab
from graphile_worker.cron.item import CronItem, parse_cron_items

__all__ = ["Cron", "CronItem", "format_crontab", "parse_cron_items", "parse_crontab"]
