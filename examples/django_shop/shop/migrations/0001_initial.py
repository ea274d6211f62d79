"""Create the table of orders. Written by: python manage.py makemigrations shop."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The first migration."""

    initial = True

    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("item", models.TextField()),
                ("email", models.EmailField(max_length=254)),
                ("invoiced", models.BooleanField(default=False)),
            ],
            options={"db_table": "orders"},
        ),
    ]
