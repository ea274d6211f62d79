// A Node worker of a run: default settings, a local queue if configured, and a ledger as in chaos/ledger.py.
// Its arguments: the path of the package's module, and the configuration (WorkerConfig in chaos/worker.py).
import { EventEmitter } from "node:events";
import { openSync, writeSync } from "node:fs";
import { pathToFileURL } from "node:url";

const library = await import(pathToFileURL(process.argv[2]).href);
const { Logger, run } = library.default ?? library;
const config = JSON.parse(process.argv[3]);
const pid = process.pid;
const ledger = openSync(config.ledger, "a");
const now = () => Number(process.hrtime.bigint()) / 1e9;
const write = (line) => writeSync(ledger, JSON.stringify(line) + "\n");
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const STEP = 0.05;
let runs = 0;

// The end of the input means that the harness is gone.
process.stdin.on("end", () => process.exit(1)).resume();

const taskList = {
  async wait(payload, { job }) {
    const name = `${pid}-${++runs}`;
    write({
      type: "begin", at: now(), run: name, job: Number(job.id), token: payload.token, attempt: job.attempts,
      task: job.task_identifier, queue: payload.queue, worker: job.locked_by, pid,
    });
    // In small steps, as chaos/tasks.py does.
    for (let left = payload.seconds; left > 0; left -= STEP) await sleep(Math.min(left, STEP));
    const fails = job.attempts <= payload.fails;
    write({ type: "end", at: now(), run: name, outcome: fails ? "raised" : "ok" });
    if (fails) throw new Error("intended failure");
  },
};

const events = new EventEmitter();
let pool = "";
events.on("pool:create", ({ workerPool }) => (pool = workerPool.id));
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(`${level}: ${message}`);
});
const localQueue = config.prefetch ? { preset: { worker: { localQueue: { size: config.prefetch } } } } : {};
const runner = await run({
  connectionString: config.dsn, taskList, events, logger, concurrency: config.concurrency, ...localQueue,
});
write({ type: "ready", at: now(), slot: config.slot, worker: pool, pid });
await runner.promise;
process.exit(0);
