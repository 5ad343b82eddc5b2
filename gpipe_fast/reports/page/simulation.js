// Simulations of a step, by the rules of gpipe_fast/schedule: a rank runs its actions one after another, a RECV
// waits for its SEND, and a SEND waits for a free slot. tests/unit/schedule/test_simulation_vectors.py compares them.
"use strict";

const TRANSFERS = new Set(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]);
const COUNTERPART = { RECV_F: ["SEND_F", -1], RECV_B: ["SEND_B", 1] };

const range = (count) => Array.from({ length: count }, (_, i) => i);

// The compute actions of every rank as [stage, kind, micro-batch], in order, from the numbers of stages,
// micro-batches and ranks.
const SCHEDULES = {
  gpipe: (stages, count) =>
    range(stages).map((stage) => [
      ...range(count).map((m) => [stage, "F", m]),
      ...range(count).reverse().map((m) => [stage, "B", m]),
    ]),

  "1f1b": (stages, count) =>
    range(stages).map((stage) => {
      const ahead = Math.min(stages - stage, count);
      const row = range(ahead).map((m) => [stage, "F", m]);
      for (const m of range(count)) {
        row.push([stage, "B", m]);
        if (m + ahead < count) row.push([stage, "F", m + ahead]);
      }
      return row;
    }),

  "zb-h1": (stages, count) =>
    range(stages).map((stage) => {
      const ahead = Math.min(stages - stage, count);
      const row = range(ahead).map((m) => [stage, "F", m]);
      for (const m of range(count)) {
        row.push([stage, "I", m]);
        if (m >= stage) row.push([stage, "W", m - stage]);
        if (m + ahead < count) row.push([stage, "F", m + ahead]);
      }
      for (let m = Math.max(0, count - stage); m < count; m++) row.push([stage, "W", m]);
      return row;
    }),

  interleaved(stages, count, ranks) {
    const perRank = stages / ranks;
    if (!Number.isInteger(perRank)) throw new Error(`${ranks} ranks do not divide ${stages} stages`);
    const rounds = range(Math.ceil(count / ranks));
    return range(ranks).map((rank) => {
      const own = range(perRank).map((i) => rank + i * ranks);
      const inRounds = (kind, order) =>
        rounds.flatMap((round) =>
          order.flatMap((stage) => range(ranks).map((i) => [stage, kind, round * ranks + i])),
        );
      const forwards = inRounds("F", own);
      const backwards = inRounds("B", [...own].reverse());
      const ahead = (perRank - 1) * ranks + 2 * (ranks - 1 - rank) + 1;
      const row = forwards.slice(0, ahead);
      backwards.forEach((backward, i) => row.push(backward, ...forwards.slice(ahead + i, ahead + i + 1)));
      return row.filter(([, , m]) => m < count);
    });
  },
};

// Returns a compute action with the transfers and the recompute that it needs. A backward that sends a gradient
// is split into I and W.
function withTransfers([stage, kind, m], last, recomputed) {
  let kinds = [kind];
  if (kind === "F") kinds = [...(stage > 0 ? ["RECV_F"] : []), "F", ...(stage < last ? ["SEND_F"] : [])];
  if (kind === "B" || kind === "I") {
    kinds = [...(m < recomputed ? ["R"] : []), ...(stage < last ? ["RECV_B"] : [])];
    kinds.push(kind === "B" && stage > 0 ? "I" : kind, ...(stage > 0 ? ["SEND_B"] : []));
    if (kind === "B" && stage > 0) kinds.push("W");
  }
  return kinds.map((each) => ({ stage, kind: each, microbatch: m, name: `${stage}${each}${m}`, awaits: null }));
}

// Lets each RECV wait for its SEND, and each SEND for the RECV that frees its slot.
function connect(actions, slots) {
  const sends = new Map();
  for (const a of actions) if (a.kind.startsWith("SEND")) listOf(sends, a.stage + a.kind).push(a);
  const taken = new Map();
  for (const a of actions) {
    if (!(a.kind in COUNTERPART)) continue;
    const [kind, step] = COUNTERPART[a.kind];
    const [from, before] = [sends.get(a.stage + step + kind), listOf(taken, a.stage + a.kind)];
    a.awaits = from[before.length];
    if (before.length + slots < from.length) from[before.length + slots].awaits = a;
    before.push(a);
  }
}

function listOf(map, key) {
  if (!map.has(key)) map.set(key, []);
  return map.get(key);
}

// Sets the begin and the end of every action.
function setTimes(ranks, seconds, transit) {
  const following = ranks.map(() => 0);
  const free = ranks.map(() => 0);
  for (let progress = true; progress; ) {
    progress = false;
    ranks.forEach((actions, rank) => {
      for (; following[rank] < actions.length; following[rank]++) {
        const a = actions[following[rank]];
        if (a.awaits && a.awaits.end === undefined) return;
        let ready = a.awaits ? a.awaits.end : 0;
        if (a.kind in COUNTERPART) ready += transit(a.awaits);
        a.end = free[rank] = Math.max(free[rank], ready) + seconds(a);
        a.begin = a.end - seconds(a);
        progress = true;
      }
    });
  }
  const stuck = ranks.flatMap((actions, rank) => actions.slice(following[rank], following[rank] + 1));
  if (stuck.length) throw new Error(`deadlock: ${stuck.map((a) => a.name).join(", ")}`);
}

function criticalPath(ranks, time) {
  const before = new Map(ranks.flatMap((actions) => actions.map((a, i) => [a, actions[i - 1] || null])));
  let action = ranks.flat().reduce((found, a) => (a.end > found.end ? a : found));
  const path = [];
  while (action) {
    path.push(action);
    const own = before.get(action);
    action = (own && own.end >= action.begin - 1e-9 * time) || !action.awaits ? own : action.awaits;
  }
  return path.reverse();
}

// Returns what a list of actions keeps as a step function of the time, and its peak. `amounts` gives what a
// micro-batch keeps from its forward on, and what more from the begin of its backward on.
function memoryOf(actions, amounts) {
  const key = (a) => `${a.stage} ${a.microbatch}`;
  const last = new Map(actions.filter((a) => a.kind === "B" || a.kind === "W").map((a) => [key(a), a]));
  const begun = new Set();
  const curve = [[0, 0]];
  let [total, peak] = [0, 0];
  const add = (time, amount) => amount && curve.push([time, (total += amount)]);
  for (const a of actions) {
    const [first, more] = amounts(a.stage, a.microbatch);
    if (a.kind === "F") add(a.begin, first);
    else if ("RBI".includes(a.kind) && !begun.has(key(a))) {
      begun.add(key(a));
      add(a.begin, more);
    }
    peak = Math.max(peak, total);
    if (last.get(key(a)) === a) add(a.end, -(first + more));
  }
  return { curve, peak };
}

const DEFAULT_SETTINGS = {
  schedule: "gpipe", num_stages: 1, num_microbatches: 1, num_devices: 1, checkpoint: "except_last",
  forward: 1, backward: 2, transfer: 0, latency: 0, bandwidth: Infinity, boundary_bytes: 0, activation_bytes: 0,
};

// Simulates a step. The settings are named as the arguments of gpipe_fast.simulate, besides `slots`.
function simulate(settings) {
  const given = { ...DEFAULT_SETTINGS, ...settings };
  const { num_stages: stages, num_microbatches: count } = given;
  const perStage = (value) => (Array.isArray(value) ? value : range(stages).map(() => value));
  const [forward, backward, transfer] = [given.forward, given.backward, given.transfer].map(perStage);
  const recompute = perStage(given.recompute ?? forward);
  const weights = perStage(given.weights ?? backward.map((value) => value / 2));
  const [boundary, activations] = [given.boundary_bytes, given.activation_bytes].map(perStage);
  const recomputed = { always: count, except_last: count - 1, never: 0 }[given.checkpoint];
  const numRanks = given.num_devices > 1 ? given.num_devices : Math.max(1, Math.floor(stages / 2));
  const ranks = SCHEDULES[given.schedule](stages, count, numRanks).map((row) =>
    row.flatMap((action) => withTransfers(action, stages - 1, recomputed)),
  );
  connect(ranks.flat(), given.slots ?? count);
  const costs = { F: forward, R: recompute, B: backward, W: weights, SEND_F: transfer, SEND_B: transfer };
  costs.I = range(stages).map((stage) => backward[stage] - weights[stage]);
  setTimes(
    ranks,
    (a) => (costs[a.kind] ? costs[a.kind][a.stage] : 0),
    (send) => given.latency + boundary[send.kind === "SEND_F" ? send.stage + 1 : send.stage] / given.bandwidth,
  );
  const time = Math.max(...ranks.map((actions) => actions[actions.length - 1].end));
  const computing = ranks.map((actions) => actions.filter((a) => !TRANSFERS.has(a.kind)));
  const busy = computing.map((actions) => actions.reduce((sum, a) => sum + (a.end - a.begin), 0));
  const bytes = (stage, m) =>
    m < recomputed ? [boundary[stage], activations[stage]] : [boundary[stage] + activations[stage], 0];
  const ofStage = () => range(stages).map((stage) => ranks.flat().filter((a) => a.stage === stage));
  return {
    ranks,
    time,
    busy,
    bubble: 1 - busy.reduce((a, b) => a + b) / (busy.length * time),
    // These are computed when they are read.
    get kept() {
      return ofStage().map((actions) => memoryOf(actions, () => [1, 0]).peak);
    },
    get peak_bytes() {
      return ofStage().map((actions) => memoryOf(actions, bytes).peak);
    },
    get memory() {
      return ranks.map((actions) => memoryOf(actions, bytes));
    },
    get critical_path() {
      return criticalPath(ranks, time);
    },
  };
}

if (typeof module !== "undefined") module.exports = { simulate };
