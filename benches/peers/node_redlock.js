// One run of node-redlock with ioredis: see src/peers/scripts.rs. Asynchronous tasks, dealt to at most 8 clients.
"use strict";

const Redis = require("ioredis");
const Redlock = require("redlock");

const [port, contenders, holdMs, pauseMs, lengthMs] = process.argv.slice(2).map(Number);
const micros = () => Number(process.hrtime.bigint() / 1000n);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const late = [];
let held = 0;

async function contend(redlock, end) {
  const waits = [];
  for (let asked = micros(); asked < end; asked = micros()) {
    const lock = await redlock.lock("lock:wanted-by-all", 60000);
    const got = micros();
    (got < end ? waits : late).push(got - asked);
    if (holdMs) await sleep(holdMs);
    if (got < end) held += micros() - got;
    await lock.unlock();
    if (pauseMs) await sleep(pauseMs);
  }
  return waits;
}

async function main() {
  const clients = Array.from({ length: Math.min(contenders, 8) }, () => new Redis(port, "127.0.0.1"));
  await Promise.all(clients.map((client) => client.ping()));
  // It gives up after ten tries unless told to go on; the delays are its own.
  const redlocks = clients.map((client) => new Redlock([client], { retryCount: -1 }));
  const end = micros() + lengthMs * 1000;
  const tasks = Array.from({ length: contenders }, (_, at) => contend(redlocks[at % redlocks.length], end));
  const results = await Promise.all(tasks);
  console.log(lengthMs * 1000, held);
  console.log(late.join(" "));
  for (const waits of results) console.log(waits.join(" "));
  for (const client of clients) client.disconnect();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
