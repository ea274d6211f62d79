# graphile-worker as an image. Tasks are mounted, or copied, to /worker/tasks:
#   docker build -t graphile-worker .
#   docker run --init -v "$PWD/tasks:/worker/tasks" -e DATABASE_URL=postgresql://... graphile-worker -j 10
FROM python:3.13-slim AS build
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir /source

FROM python:3.13-slim
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home worker
USER worker
WORKDIR /worker
ENTRYPOINT ["graphile-worker"]
