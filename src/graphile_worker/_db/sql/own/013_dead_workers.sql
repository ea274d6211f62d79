-- Workers that were declared dead: they claim nothing. Each exchange looks here and not into _private_workers, where
-- every heartbeat leaves a row version. While an old transaction is open no version is removed, so that look would take
-- longer by the hour. This table is normally empty.
--
-- A row is inserted by the transaction that declares the worker dead, and deleted by the one in which it registers again.
create table if not exists {schema}._private_python_dead_workers (
  worker_id text primary key,
  died_at timestamptz not null default now()
);
insert into {schema}._private_python_dead_workers (worker_id)
select worker.id from {schema}._private_workers as worker where worker.metadata ? 'died_at'
on conflict (worker_id) do nothing;
