// The driver of Graphile Worker for Node. protocol.py describes the commands.
// Its argument is the path of the package's module.
import { EventEmitter } from "node:events";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const library = await import(pathToFileURL(process.argv[2]).href);
const { Logger, makeWorkerUtils, run } = library.default ?? library;
const pg = await import("node:module").then(({ createRequire }) => createRequire(process.argv[2])("pg"));

const monotonic = () => Number(process.hrtime.bigint()) / 1e9;
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const logger = new Logger(() => () => {});
const utils = await makeWorkerUtils({ maxPoolSize: 10, logger });
// The server allows 200 connections. Jobs share the connections of a pool.
const MOST_CONNECTIONS = 150;
const PAUSE = 0.005;
let runner;
let completions = [0, 0];

let latencies = [];
let arrived = () => {};
async function take(count) {
  while (latencies.length < count) await new Promise((done) => (arrived = done));
  const taken = latencies;
  latencies = [];
  return taken;
}

const taskList = {
  async trivial() {},
  async sync() {},
  async sleep(payload) {
    await sleep(payload.seconds);
  },
  async fail() {
    throw new Error("on purpose");
  },
  async probe(payload) {
    latencies.push("sent" in payload ? monotonic() - payload.sent : Date.now() / 1000 - payload.due);
    arrived();
  },
};

function options(concurrency, tuned) {
  const maxPoolSize = Math.min(concurrency + 1, MOST_CONNECTIONS);
  const worker = { concurrentJobs: concurrency, maxPoolSize, pollInterval: 2000, logger };
  if (tuned) {
    worker.localQueue = { size: 500, refetchDelay: { durationMs: 10 } };
    worker.completeJobBatchDelay = 0;
    worker.failJobBatchDelay = 0;
  }
  return { taskList, noHandleSignals: true, logger, preset: { worker } };
}

const answers = {
  async install() {
    await utils.migrate();
  },
  async clear() {
    const client = new pg.Client();
    await client.connect();
    await client.query("truncate graphile_worker._private_jobs, graphile_worker._private_job_queues");
    await client.end();
  },
  async enqueue({ task, count, how = "bulk", queues = 0, seconds = 0 }) {
    const maxAttempts = task === "fail" ? 1 : undefined;
    if (how === "bulk") {
      const specs = [];
      for (let id = 0; id < count; id++) {
        const queueName = queues ? `queue ${id % queues}` : undefined;
        specs.push({ identifier: task, payload: { id, seconds }, queueName, maxAttempts });
      }
      await utils.addJobs(specs);
      return;
    }
    const lanes = how === "ten" ? 10 : 1;
    const lane = async () => {
      for (let id = 0; id < Math.floor(count / lanes); id++) {
        await utils.addJob(task, { id, seconds }, { maxAttempts });
      }
    };
    await Promise.all(Array.from({ length: lanes }, lane));
  },
  async start({ concurrency, tuned = false }) {
    const counted = (completions = [0, 0]);
    const events = new EventEmitter();
    events.on("job:complete", () => {
      counted[0] += 1;
      counted[1] = monotonic();
    });
    runner = await run({ ...options(concurrency, tuned), events });
  },
  async completed() {
    return completions;
  },
  async stop() {
    await runner.stop();
  },
  async probe({ samples }) {
    const taken = [];
    for (let sample = 0; sample < samples; sample++) {
      await sleep(PAUSE);
      await utils.addJob("probe", { sent: monotonic() });
      taken.push(...(await take(1)));
    }
    return taken;
  },
  async feed({ rate, count }) {
    const start = monotonic();
    for (let number = 0; number < count; number++) {
      const pause = start + number / rate - monotonic();
      if (pause > 0) await sleep(pause);
      await utils.addJob("probe", { sent: monotonic() });
    }
  },
  async schedule({ delays }) {
    for (const delay of delays) {
      const due = Date.now() + delay * 1000;
      await utils.addJob("probe", { due: due / 1000 }, { runAt: new Date(due) });
    }
  },
  async received({ count }) {
    return await take(count);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...options } = JSON.parse(line);
  const start = monotonic();
  let answer;
  try {
    const value = (await answers[command](options)) ?? null;
    answer = { value, seconds: monotonic() - start };
  } catch (error) {
    answer = { error: `${error.name}: ${error.message}` };
  }
  console.log(JSON.stringify(answer));
}
await utils.release();
