"""The settings of a project whose tests run in the test suite, under each Django that is found."""

import os

import django
from psycopg.conninfo import conninfo_to_dict

_given = conninfo_to_dict(os.environ["DATABASE_URL"])
_postgresql = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": _given["dbname"],
    "USER": _given.get("user", ""),
    "PASSWORD": _given.get("password", ""),
    "HOST": _given.get("host", ""),
    "PORT": _given.get("port", ""),
    "TEST": {"MIGRATE": os.environ.get("MIGRATE") != "no"},
    "CONN_MAX_AGE": None,  # threads keep their connections, which may be lost
}
_sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
# The queue may be in another database than the default one.
QUEUE = os.environ.get("QUEUE", "default")
DATABASES = {"default": _postgresql} if QUEUE == "default" else {"default": _sqlite, QUEUE: _postgresql}

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
GRAPHILE_WORKER = {"DATABASE": QUEUE, "HISTORY": "all"}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    *([] if django.VERSION >= (6,) else ["django_tasks"]),
    "graphile_worker.contrib.django",
    "shop",
]

LOGGING_CONFIG = None
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "urls"
SECRET_KEY = "only for tests"
TASKS = {"default": {"BACKEND": "graphile_worker.contrib.django.backend.GraphileWorkerBackend", "QUEUES": []}}
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
USE_TZ = True
