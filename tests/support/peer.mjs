// A Node worker in its own process, which runs requests from a test. tests/support/peer.py starts it.
//
// Its arguments: the folder of the package, and the name of the schema. Each line of its input is a request,
// [number, method, ...arguments]. Each line of its output is [number, answer], [number, null, error], or
// [0, message] for a message that is not an answer. The process exits when its input ends.
import { EventEmitter } from "node:events";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [folder, schema] = process.argv.slice(2);
const { Logger, makeWorkerUtils, run, runMigrations, runOnce } = createRequire(`${folder}/`)("graphile-worker");

const write = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const send = (what, about) => write([0, { what, ...about }]);
const logger = new Logger(() => (level, message) => {
  if (level === "warning" || level === "error") send("log", { level, message });
});

const BEGIN = "insert into ledger (job_id, worker, who) values ($1, $2, 'node') returning run";
const END = "update ledger set ended = clock_timestamp() where run = $1";
const held = new Map();

const tasks = {
  // Sends everything it knows about the job.
  see: async (payload, { job, getQueueName }) =>
    send("seen", { payload, job, queue: job.job_queue_id && (await getQueueName()) }),
  sleep: (...given) => tasks.see(...given), // has the name of a task in victim.py, but does not wait
  // Runs until a request ends it.
  async hold(payload, { job }) {
    const end = new Promise((resolve, reject) => held.set(job.id, { resolve, reject }));
    send("started", { id: Number(job.id), job, payload });
    await end;
  },
  async fail(payload) {
    throw new Error(payload.error);
  },
  // Records its start and end in the database.
  async record(payload, { job, query }) {
    const { rows } = await query(BEGIN, [job.id, job.locked_by]);
    await new Promise((resolve) => setTimeout(resolve, payload.ms ?? 0));
    await query(END, [rows[0].run]);
  },
  // Fails for some items. Other items fail in Python.
  batch: (payload) =>
    payload.map(async (item) => {
      if (item.fails?.includes("node")) throw new Error(`${item.n} fails in Node`);
    }),
};

const settings = (names, worker) => ({
  taskList: Object.fromEntries(names.map((name) => [name, tasks[name]])),
  logger,
  preset: { worker: { connectionString: "", schema, ...worker } },
});

let utils, runner, pool;
const requests = {
  migrate: () => runMigrations({ schema, logger }),
  // Any method of WorkerUtils.
  async utils(method, ...given) {
    utils ??= await makeWorkerUtils({ schema, logger });
    return utils[method](...given);
  },
  async query(text, values) {
    utils ??= await makeWorkerUtils({ schema, logger });
    return utils.withPgClient(async (client) => (await client.query(text, values)).rows);
  },
  async start(names, worker, forbiddenFlags) {
    const events = new EventEmitter();
    events.on("pool:create", ({ workerPool }) => (pool = workerPool.id));
    // Node emits this event just before it sends LISTEN, and does not poll afterwards. A job added until then
    // waits for the next poll, and a migration until then is missed. The query below is answered after LISTEN.
    const listening = new Promise((resolve) =>
      events.once("pool:listen:success", ({ client }) =>
        setImmediate(() => client.query("select 1").then(resolve, resolve)),
      ),
    );
    for (const name of ["job:success", "job:error", "job:failed"])
      events.on(name, ({ job }) => send(name, { id: Number(job.id) }));
    runner = await run({ ...settings(names, worker), events, forbiddenFlags, noHandleSignals: true });
    // The exit code of Node's command.
    const ended = runner.promise.finally(() => send("stopped", { code: process.exitCode ?? 0 })).catch(() => {});
    await Promise.race([listening, ended]);
    return pool;
  },
  once: (names, worker) => runOnce({ ...settings(names, worker), noHandleSignals: true }),
  release: (id, error) => {
    const { resolve, reject } = held.get(String(id));
    error ? reject(new Error(error)) : resolve();
  },
  stop: () => runner.stop(),
};

createInterface({ input: process.stdin })
  .on("line", async (line) => {
    const [number, method, ...given] = JSON.parse(line, (key, value) => (key === "runAt" ? new Date(value) : value));
    try {
      write([number, (await requests[method](...given)) ?? null]);
    } catch (error) {
      write([number, null, String(error?.message ?? error)]);
    }
  })
  .on("close", () => process.exit());
