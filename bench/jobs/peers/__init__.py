"""Programs that run in the environments of others: workers and callers of Celery, arq and taskiq."""
