// npm's Graphile Worker in a process of its own, which does what it is told. tests/support/peer.py starts it.
//
// Its arguments: the folder of the package, and the name of the schema. Each line of its input is an order,
// [number, method, ...arguments]; each line of its output is [number, answer], [number, null, error], or
// [0, what it tells by itself]. When its input ends it is gone.
import { EventEmitter } from "node:events";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [folder, schema] = process.argv.slice(2);
const { Logger, makeWorkerUtils, run, runMigrations, runOnce } = createRequire(`${folder}/`)("graphile-worker");

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const tell = (what, about) => say([0, { what, ...about }]);
const logger = new Logger(() => (level, message) => {
  if (level === "warning" || level === "error") tell("log", { level, message });
});

const BEGIN = "insert into ledger (job_id, worker, who) values ($1, $2, 'node') returning run";
const END = "update ledger set ended = clock_timestamp() where run = $1";
const held = new Map();

const tasks = {
  // Says all that it knows of the job.
  see: async (payload, { job, getQueueName }) =>
    tell("seen", { payload, job, queue: job.job_queue_id && (await getQueueName()) }),
  sleep: (...given) => tasks.see(...given), // whose name in victim.py it has, and not its patience
  // Goes on until it is told how to end.
  async hold(payload, { job }) {
    const end = new Promise((resolve, reject) => held.set(job.id, { resolve, reject }));
    tell("begun", { id: Number(job.id), job, payload });
    await end;
  },
  async fail(payload) {
    throw new Error(payload.error);
  },
  // Leaves in the database when it began and ended.
  async record(payload, { job, query }) {
    const { rows } = await query(BEGIN, [job.id, job.locked_by]);
    await new Promise((resolve) => setTimeout(resolve, payload.ms ?? 0));
    await query(END, [rows[0].run]);
  },
  // Has items that fail here, and others that fail elsewhere.
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
const orders = {
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
    // It says so just before it sends LISTEN, and does not look again afterwards: what is added until then waits
    // for the next poll, and a migration until then is never heard of. What is asked next is answered next.
    const listening = new Promise((resolve) =>
      events.once("pool:listen:success", ({ client }) =>
        setImmediate(() => client.query("select 1").then(resolve, resolve)),
      ),
    );
    for (const name of ["job:success", "job:error", "job:failed"])
      events.on(name, ({ job }) => tell(name, { id: Number(job.id) }));
    runner = await run({ ...settings(names, worker), events, forbiddenFlags, noHandleSignals: true });
    // As npm's command ends.
    const ended = runner.promise.finally(() => tell("stopped", { code: process.exitCode ?? 0 })).catch(() => {});
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
      say([number, (await orders[method](...given)) ?? null]);
    } catch (error) {
      say([number, null, String(error?.message ?? error)]);
    }
  })
  .on("close", () => process.exit());
