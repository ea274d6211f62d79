// Node's side of benchmarks/enqueue.py: reads a case per line, prints jobs per second for each.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const { makeWorkerUtils } = await import(pathToFileURL(process.argv[2]).href);
const utils = await makeWorkerUtils({ maxPoolSize: 10 });

const cases = {
  async bulk(count) {
    const specs = [];
    for (let id = 0; id < count; id++) specs.push({ identifier: "t", payload: { id } });
    await utils.addJobs(specs);
  },
  async single(count) {
    for (let id = 0; id < count; id++) await utils.addJob("t", { id });
  },
  async ten(count) {
    const lane = async () => {
      for (let id = 0; id < count / 10; id++) await utils.addJob("t", { id });
    };
    await Promise.all(Array.from({ length: 10 }, lane));
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, count] = line.split(" ");
  const start = process.hrtime.bigint();
  await cases[name](Number(count));
  const seconds = Number(process.hrtime.bigint() - start) / 1e9;
  console.log(String(Number(count) / seconds));
}
await utils.release();
