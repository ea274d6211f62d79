// Node's Graphile Worker in a run: npm's defaults, a local queue if so ordered, and the ledger that chaos/ledger.py describes.
// Its arguments: the path of the package's module, and orders as chaos/worker.py has them.
import { EventEmitter } from "node:events";
import { openSync, writeSync } from "node:fs";
import { pathToFileURL } from "node:url";

const library = await import(pathToFileURL(process.argv[2]).href);
const { Logger, run } = library.default ?? library;
const orders = JSON.parse(process.argv[3]);
const pid = process.pid;
const ledger = openSync(orders.ledger, "a");
const now = () => Number(process.hrtime.bigint()) / 1e9;
const write = (line) => writeSync(ledger, JSON.stringify(line) + "\n");
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const STEP = 0.05;
let runs = 0;

// Whoever started us is gone.
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
    if (fails) throw new Error("as told");
  },
};

const events = new EventEmitter();
let pool = "";
events.on("pool:create", ({ workerPool }) => (pool = workerPool.id));
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(`${level}: ${message}`);
});
const ahead = orders.prefetch ? { preset: { worker: { localQueue: { size: orders.prefetch } } } } : {};
const runner = await run({
  connectionString: orders.dsn, taskList, events, logger, concurrency: orders.concurrency, ...ahead,
});
write({ type: "ready", at: now(), slot: orders.slot, worker: pool, pid });
await runner.promise;
process.exit(0);
