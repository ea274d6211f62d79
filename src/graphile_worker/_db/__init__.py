"""The only package that knows SQL or a database driver."""
