"""Create the table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The first migration."""

    initial = True
    operations = [
        migrations.CreateModel(
            "Order",
            [
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("item", models.TextField()),
                ("notes", models.JSONField(default=list)),
            ],
        )
    ]
