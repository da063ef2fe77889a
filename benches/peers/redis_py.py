"""One run of redis-py's Lock: see src/peers/scripts.rs. Threads, dealt to at most 8 processes."""

import sys
import threading
import time
from multiprocessing import Barrier, Process, Queue

import redis

PORT, CONTENDERS, HOLD_MS, PAUSE_MS, LENGTH_MS = map(int, sys.argv[1:])
PROCESSES = min(CONTENDERS, 8)


def contend(client, end, results):
    waits, late, held = [], [], 0.0
    while (asked := time.monotonic()) < end:
        lock = client.lock("lock:wanted-by-all", timeout=60)
        lock.acquire()
        got = time.monotonic()
        (waits if got < end else late).append(round((got - asked) * 1e6))
        if HOLD_MS:
            time.sleep(HOLD_MS / 1e3)
        if got < end:
            held += time.monotonic() - got
        lock.release()
        if PAUSE_MS:
            time.sleep(PAUSE_MS / 1e3)
    results.append((waits, late, held))


def process(threads, barrier, queue):
    client = redis.Redis(port=PORT)
    client.ping()
    barrier.wait()
    end = time.monotonic() + LENGTH_MS / 1e3
    results = []
    workers = [threading.Thread(target=contend, args=(client, end, results)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    queue.put(results)


if __name__ == "__main__":
    barrier, queue = Barrier(PROCESSES), Queue()
    shares = [CONTENDERS // PROCESSES + (at < CONTENDERS % PROCESSES) for at in range(PROCESSES)]
    processes = [Process(target=process, args=(share, barrier, queue)) for share in shares]
    for one in processes:
        one.start()
    results = [result for _ in processes for result in queue.get()]
    for one in processes:
        one.join()
    print(LENGTH_MS * 1000, round(sum(held for _, _, held in results) * 1e6))
    print(*(wait for _, late, _ in results for wait in late))
    for waits, _, _ in results:
        print(*waits)
