// The page to play with: settings, their simulation, the animation, and the tour.
"use strict";

// The simulated model, for a whole mini-batch on one device: milliseconds and bytes.
const MODEL = { forward: 100, backward: 200, activations: 4 * 2 ** 30, boundary: 100 * 2 ** 20 };
const STEP_SECONDS = 12; // of the animation at speed 1
const UPDATE = 0.05; // of the step's time, for the drawing of the update
const COSTS = { least: 0.2, most: 3, step: 0.1 };
const SCHEDULE_NOTES = {
  gpipe: "GPipe: all forwards, then all backwards. The default.",
  "1f1b": "1F1B: the same bubble, but a stage keeps at most K micro-batches. Choose it if memory is short.",
  interleaved: `Interleaved: each device runs two smaller stages in turn (a line on top marks the second). A smaller
    bubble, twice the transfers. Choose it if links are fast.`,
  "zb-h1": "ZB-H1: 1F1B whose weight gradients (W) fill the bubble. Choose it if 1F1B's bubble is too large.",
};
const KEPT = {
  never: "activations",
  except_last: "entering tensors only; of the last, the activations",
  always: "entering tensors only",
};
const EQUAL = [1, 1, 1, 1, 1, 1, 1, 1];
const DEFAULTS = { K: 4, M: 8, checkpoint: "never", schedule: "gpipe", costs: EQUAL, latency: 0, overhead: 0.5 };

// The captions: settings, where the animation begins (as a share of it), and a text that may use the figures of
// these settings.
const TOUR = [
  {
    title: "One stage works, the others wait",
    settings: { M: 1 },
    text: (f) => `<p>A model that is too large for one device is cut into <b>stages</b>: consecutive layers, one stage on each
      device. Here are four. In the <b>forward</b> (blue), a stage needs the <b>activation</b> of the one before it, the
      result of that one's layers. The <b>backward</b> (orange) starts at the last stage and goes back: a stage needs the gradient from its
      successor.</p><p>If the mini-batch passes through in one piece, one device works at a time and the others are <b>idle</b>
      (grey). The speed-up of four devices is ${f.speedup}: below 1, because four stages have more actions than one, and each
      action costs ${f.overhead} of overhead.</p>`,
  },
  {
    title: "Cut the mini-batch into micro-batches",
    settings: { M: 8 },
    text: (f) => `<p>GPipe cuts the mini-batch into <b>micro-batches</b>, here 8, numbered from 0: F3 is the forward of
      micro-batch 3. While stage 1 computes micro-batch 0, stage 0 already computes micro-batch 1.</p><p>Soon all stages work.
      They are idle only while the pipeline <b>fills</b>, turns from forward to backward, and <b>drains</b>. All this idle time
      together is the <b>bubble</b>: ${f.bubble} of the step, instead of 75% with one micro-batch. With all forwards first, and
      then all backwards, K equal stages without recompute and M micro-batches have (K−1)/(M+K−1). The speed-up is
      ${f.speedup}.</p>`,
  },
  {
    title: "The gradients stay exact",
    settings: { M: 4 },
    from: 0.5,
    text: () => `<p>A micro-batch does not change the weights. Its backward only adds its gradient to a sum. When the last one
      is done, all stages <b>update</b> their weights, once: the band at the right end.</p><p>The loss of a mini-batch adds up
      over its samples (a mean is divided once, at the end), so its gradient is the sum of the micro-batches' gradients. The
      update is <b>synchronous</b>: all gradients are computed with the same weights. So a step computes the same as without a
      pipeline, up to the rounding of sums, and with the same dropout in a recompute. The exception is batch norm.</p>`,
  },
  {
    title: "Recompute: less memory for more time",
    settings: { M: 8, checkpoint: "always" },
    text: (f) => `<p>A backward needs all activations of its forward. Kept until then, they fill the memory: ${f.memoryNever}
      per device. The curve under each stage shows it.</p><p>With <b>recompute</b>, a stage keeps only the tensor that entered
      it, and runs the forward again just before the backward (green). The peak falls to ${f.memory}.</p><p>The price is a
      second forward: a third more work, but the step takes only ${f.slower} longer, ${f.time} instead of ${f.timeNever},
      because a part of the recompute fills waiting time. If the memory suffices, <i>never</i> is faster.</p>`,
  },
  {
    title: "How many micro-batches?",
    settings: { M: 16, overhead: 1 },
    text: (f) => `<p>More micro-batches make the bubble smaller: below 20% with M = 4 K. But each action has an <b>overhead</b>,
      here ${f.overhead}, however little it computes: its operators must be started, and small ones do not keep a device
      busy.</p><p>Begin with <b>M = 4 K</b>, the rule of the paper, then try fewer and more. Here that is 16, and the best is
      M = ${f.best}. The bars above the slider of M show the step time for each M. Move M to 32, or the overhead to 0.</p>`,
  },
  {
    title: "What a pipeline cannot do",
    settings: { M: 16, costs: [1, 1, 2, 1, 1, 1, 1, 1] },
    text: (f) => `<p><b>The slowest stage rules.</b> Stage 2 has 40% of the work. The others wait for it, the critical path
      (red) runs through it, and the speed-up is ${f.speedup}. Drag its bar down.</p><p><b>A layer stays whole.</b> If one layer
      is too large for a device, a pipeline does not help. <b>If the model fits into one device</b>, copies of it on all
      devices, each with a part of the mini-batch (data parallelism), have no bubble.</p><p><b>Batch norm</b> computes its
      statistics per micro-batch, so its results depend on M.</p><p><b>Now try
      your own</b>: change the settings, and watch the step time, the bubble and the memory.</p>`,
  },
];

const state = { ...DEFAULTS, position: 0, playing: false, speed: 1, caption: 0 };
const motion = matchMedia("(prefers-reduced-motion: reduce)");
const timeline = new Timeline(byId("timeline"), byId("tooltip"), (time) => seek(time));
const flow = byId("flow");
const clock = () => performance.now() / 1000;
let found; // the simulation of the settings
let pending; // the next frame of the animation
let moves; // for each micro-batch, its forwards and backwards in time

// Returns the arguments of gpipe_fast.simulate for settings of the page.
function argumentsOf({ K, M, checkpoint, schedule, costs, latency, overhead }) {
  const stages = schedule === "interleaved" ? 2 * K : K;
  const total = range(stages).reduce((sum, stage) => sum + costs[stage % K], 0);
  const each = (value, extra = 0) => range(stages).map((stage) => (value * costs[stage % K]) / total / M + extra);
  const backward = each(MODEL.backward, overhead);
  return {
    schedule, num_stages: stages, num_microbatches: M, num_devices: K, checkpoint,
    forward: each(MODEL.forward, overhead), backward, latency,
    weights: schedule === "zb-h1" ? backward.map((value) => value / 2) : 0,
    boundary_bytes: MODEL.boundary / M,
    activation_bytes: each(MODEL.activations),
  };
}

function simulated(settings) {
  const result = simulate(argumentsOf(settings));
  // A backward in one block is an I without a W.
  const blocks = result.ranks.map((actions) =>
    actions
      .filter((a) => !TRANSFERS.has(a.kind) && a.end > a.begin)
      .map((a) => (a.kind === "I" && settings.schedule !== "zb-h1" ? { ...a, kind: "B", source: a } : a)),
  );
  return {
    ...result, blocks,
    peak: Math.max(...result.memory.map(({ peak }) => peak)),
    // The micro-batches that a device keeps at most, where each of its stages counts.
    most: Math.max(...result.ranks.map((actions) => memoryOf(actions, () => [1, 0]).peak)),
  };
}

const percent = (share) => `${(100 * Math.max(0, share)).toFixed(1)}%`;
const microbatches = (count) => `${count} micro-batch${count === 1 ? "" : "es"}`;

// Returns whole percentages that add up to 100: the largest remainders are rounded up.
function sharesOf(costs) {
  const total = costs.reduce((a, b) => a + b);
  const exact = costs.map((cost) => (100 * cost) / total);
  const shares = exact.map(Math.floor);
  const order = range(costs.length).sort((a, b) => exact[b] - shares[b] - (exact[a] - shares[a]) || a - b);
  const missing = 100 - shares.reduce((a, b) => a + b);
  for (const stage of order.slice(0, missing)) shares[stage] += 1;
  return shares;
}

// Compares the bubble with the formula, and says why it differs.
function bubbleNote({ K, M, schedule, checkpoint, costs, latency }, { bubble }) {
  const formula = (K - 1) / (M + K - 1);
  const text = `fill-drain of equal stages without recompute: ${percent(formula)}`;
  if (Math.abs(bubble - formula) < 5e-4) return text;
  const reasons = [
    schedule !== "gpipe" && "another schedule",
    checkpoint !== "never" && (checkpoint === "always" || M > 1) && "recompute fills waiting time",
    costs.slice(0, K).some((cost) => cost !== costs[0]) && "a slow stage",
    latency > 0 && "latency",
  ];
  return `${text}. Here: ${reasons.filter(Boolean).join(", ")}`;
}

function memoryNote({ schedule, checkpoint }, { most }) {
  const perStage = schedule === "interleaved" ? "; each of its 2 stages counts" : "";
  const until = schedule === "zb-h1" && checkpoint !== "never" ? "; recomputed activations wait for W" : "";
  return `peak of a device; ${microbatches(most)} kept (${KEPT[checkpoint]}${perStage}${until})`;
}

function figuresOf(settings, result) {
  const oneDevice = MODEL.forward + MODEL.backward + 2 * settings.overhead;
  return {
    time: `${result.time.toFixed(1)} ms`,
    oneDevice: `${oneDevice.toFixed(1)} ms`,
    speedup: `${(oneDevice / result.time).toFixed(2)} ×`,
    bubble: percent(result.bubble),
    memory: bytesText(result.peak),
    overhead: `${settings.overhead} ms`,
  };
}

// Returns the data of the timeline.
function timelineData(settings, result) {
  const end = result.time * (1 + UPDATE);
  const path = new Set(result.critical_path);
  const shares = sharesOf(settings.costs.slice(0, settings.K));
  const noun = settings.schedule === "interleaved" ? "device" : "stage";
  const rankOf = (stage) => stage % settings.K;
  const stages = result.blocks.map((blocks, rank) => ({
    name: `${noun} ${rank}`,
    note: `${shares[rank]}% of work`,
    actions: blocks.map((a) => ({
      ...a,
      name: `${a.stage}${a.kind}${a.microbatch}`,
      critical: path.has(a.source || a),
      second: a.stage >= settings.K,
    })),
    waits: [],
    idle: idleOf(blocks, result.time),
    memory: result.memory[rank].curve,
  }));
  const receives = result.ranks.flat().filter((a) => a.kind in COUNTERPART && a.awaits);
  const arrows = receives
    .map((a) => ({
      from: [rankOf(a.awaits.stage), a.awaits.end],
      to: [rankOf(a.stage), a.end],
      critical: path.has(a) && path.has(a.awaits),
    }))
    .filter(({ from, to }) => from[0] !== to[0]);
  return { unit: "ms", begin: 0, end, stages, arrows, between: [[result.time, end, "update"]] };
}

function idleOf(blocks, time) {
  const idle = [];
  let before = 0;
  for (const { begin, end } of [...blocks, { begin: time, end: time }]) {
    const cause = before === 0 ? "fill" : begin === time ? "drain" : "bubble";
    if (begin - before > 1e-6 * time) idle.push({ begin: before, end: begin, cause });
    before = end;
  }
  return idle;
}

// The picture of one time: what waits for each device, what it computes, and what it keeps.

function movesOf(result) {
  const all = result.blocks.flatMap((blocks, rank) => blocks.map((a) => ({ ...a, rank })));
  return range(state.M).map((m) =>
    all.filter((a) => a.microbatch === m && "FBI".includes(a.kind)).sort((a, b) => a.begin - b.begin),
  );
}

// Returns the actions that wait for each device, forwards and backwards, and the transfers under way.
function placesNow() {
  const waiting = range(state.K).map(() => ({ F: [], B: [] }));
  const moving = [];
  for (const own of moves) {
    const i = own.findLastIndex((a) => a.begin <= state.position);
    const [last, next] = [own[i], own[i + 1]];
    if (!next || (last && isPresent(last))) continue;
    const part = last && last.rank !== next.rank ? (state.position - last.end) / (state.latency || 1e-9) : 1;
    if (part < 1) moving.push({ kind: next.kind, from: last.rank, to: next.rank, part });
    else waiting[next.rank][next.kind === "F" ? "F" : "B"].push(next);
  }
  for (const lists of waiting) for (const list of [lists.F, lists.B]) list.sort((a, b) => a.begin - b.begin);
  return { waiting, moving };
}

const isPresent = (a) => a.begin <= state.position && state.position < a.end;

// Returns the forwards whose activations or entering tensors a rank keeps at the present time.
function keptOf(rank) {
  const begun = new Map();
  for (const a of found.ranks[rank]) {
    const key = `${a.stage} ${a.microbatch}`;
    if (a.kind === "F" && a.begin <= state.position) begun.set(key, a);
    if ((a.kind === "B" || a.kind === "W") && a.end <= state.position) begun.delete(key);
  }
  return [...begun.values()];
}

// Clears the canvas of the stages, and returns what draws on it.
function clearFlow(width, height) {
  const ratio = window.devicePixelRatio || 1;
  flow.width = width * ratio;
  flow.height = height * ratio;
  flow.style.height = `${height}px`;
  const c = flow.getContext("2d");
  c.scale(ratio, ratio);
  c.textBaseline = "middle";
  const write = (text, x, y, colour, size = 11, weight = "", align = "center") => {
    c.textAlign = align;
    c.font = `${weight} ${size}px ${FONT}`;
    c.fillStyle = timeline.colour(colour);
    c.fillText(text, x, y);
  };
  const block = (colour, x, y, w, h) => {
    c.fillStyle = timeline.colour(colour);
    c.beginPath();
    c.roundRect(x, y, w, h, Math.min(4, h / 4));
    c.fill();
  };
  return { block, write };
}

// Rows from the top: names, forwards that wait, transfers, the devices, transfers, backwards that wait.
function drawFlow() {
  const { left, right, isNarrow } = timeline;
  const [lane, box] = isNarrow ? [30, 58] : [18, 46];
  const pen = clearFlow(flow.parentElement.clientWidth, box + 130 + (isNarrow ? 14 : 0));
  const pitch = (right - left) / state.K;
  const w = pitch - Math.min(20, Math.max(4, pitch * 0.12));
  const { waiting, moving } = placesNow();
  const label = (text, y) => pen.write(text, isNarrow ? left : 0, y, "muted", 10.5, "", "left");
  label("waits for forward", isNarrow ? 22 : lane + 9);
  label("waits for backward", box + (isNarrow ? 135 : 119));
  if (!isNarrow) [["computes", 18], ["micro-batches", 58], ["kept", 71]].forEach(([text, y]) => label(text, box + y));
  const noun = state.schedule !== "interleaved" ? "stage" : pitch < 50 ? "dev." : "device";
  range(state.K).forEach((rank) => {
    const x = left + rank * pitch + (pitch - w) / 2;
    pen.write(`${noun} ${rank}`, x + w / 2, 8, "ink", pitch < 50 ? 10 : 12, pitch < 50 ? "" : "600");
    drawDevice(pen, rank, x, box, w);
    drawKept(pen, keptOf(rank), x, box, w);
    drawWaiting(pen, waiting[rank].F, x, lane, w);
    drawWaiting(pen, waiting[rank].B, x, box + 110, w);
  });
  for (const { kind, from, to, part } of moving) {
    const y = (kind === "F" ? box - 5 : box + 105) + (Math.abs(to - from) > 1 ? 3 : 0);
    pen.block(kind, left + (from + 0.5 + (to - from) * part) * pitch - 4, y - 2, 8, 4);
  }
}

// Draws the action of a device; the bar at its bottom runs in the direction of the micro-batch.
function drawDevice({ block, write }, rank, x, y, w) {
  block("idle", x, y, w, 100);
  const a = found.blocks[rank].find(isPresent);
  if (state.position > found.time) {
    block("accent", x, y, w, 36);
    write(w < 50 ? "upd." : "update", x + w / 2, y + 18, "on-accent", 12, "600");
  } else if (a) {
    block(a.kind, x, y, w, 36);
    write(`${a.kind}${a.microbatch}`, x + w / 2, y + 17, "on-block", w < 50 ? 12 : 15, "600");
    if (a.stage >= state.K) block("on-block", x, y, w, 2);
    const done = ((w - 4) * (state.position - a.begin)) / (a.end - a.begin);
    block("on-block", "BI".includes(a.kind) ? x + w - 2 - done : x + 2, y + 31, done, 3);
  } else write("idle", x + w / 2, y + 18, "on-idle", 12);
}

function drawKept({ block, write }, kept, x, y, w) {
  const columnsOf = (size) => Math.floor((w - 4) / (size + 2));
  const size = [15, 10, 8, 6, 5, 4].find((each) => columnsOf(each) * Math.floor(42 / (each + 2)) >= found.most) || 3;
  const columns = columnsOf(size);
  const left = x + (w - columns * (size + 2) + 2) / 2;
  kept.forEach(({ microbatch, stage }, i) => {
    const [at, top] = [left + (i % columns) * (size + 2), y + 42 + Math.floor(i / columns) * (size + 2)];
    block(size < 15 ? "memory" : "memory-area", at, top, size, size);
    if (size < 15) return;
    write(microbatch, at + size / 2, top + size / 2 + 0.5, "memory", 10);
    if (stage >= state.K) block("memory", at, top, size, 1.5);
  });
  write(`${w < 130 ? kept.length : microbatches(kept.length)} kept`, x + w / 2, y + 92, "memory", w < 50 ? 10 : 11);
}

// Draws what waits, the next one first, and the number of those that find no place.
function drawWaiting({ block, write }, actions, x, y, w) {
  const fits = (room) => Math.max(0, Math.floor((room + 2) / 18));
  const shown = fits(w) >= actions.length ? actions.length : fits(w - 20);
  actions.slice(0, shown).forEach(({ kind, microbatch }, i) => {
    block(kind, x + i * 18, y + 1, 16, 16);
    write(microbatch, x + i * 18 + 8, y + 9.5, "on-block", 10);
  });
  const rest = actions.length - shown;
  if (rest) write(`+${rest}`, x + shown * 18 + 1, y + 9.5, "muted", 10, "", "left");
}

function statusText() {
  if (state.position > found.time) {
    return "Update: the sum of the micro-batches' gradients changes the weights of all stages, once.";
  }
  const unfinished = new Set(found.blocks.flat().filter((a) => a.end > state.position).map((a) => a.microbatch));
  const working = found.blocks.filter((row) => row.some(isPresent)).length;
  return `${state.position.toFixed(1)} ms. Devices at work: ${working} of ${state.K}. Micro-batches with a complete gradient:
    ${state.M - unfinished.size} of ${state.M}.`;
}

function drawTime() {
  timeline.now = state.position >= timeline.data.end ? null : state.position;
  timeline.isPlaying = state.playing;
  if (state.playing && !timeline.isWhole) timeline.pan(state.position - (timeline.view[0] + timeline.view[1]) / 2);
  else timeline.draw();
  drawFlow();
  byId("scrub").value = Math.round((1000 * state.position) / timeline.data.end);
  byId("scrub").setAttribute("aria-valuetext", `${state.position.toFixed(1)} ms`);
  byId("status").textContent = statusText();
  byId("play").textContent = state.playing ? "Pause" : "Play";
}

function seek(time) {
  state.position = Math.min(Math.max(time, 0), timeline.data.end);
  drawTime();
}

function play() {
  state.playing = true;
  if (state.position >= timeline.data.end) state.position = 0;
  let before = clock();
  const frame = () => {
    const now = clock();
    const rate = (timeline.data.end / STEP_SECONDS) * state.speed;
    if (motion.matches) {
      if (now - before >= 0.5 / state.speed) [before] = [now, seek(eventTime(1))];
    } else {
      seek(state.position + (now - before) * rate);
      before = now;
    }
    if (state.position >= timeline.data.end) pause();
    else pending = requestAnimationFrame(frame);
  };
  drawTime();
  pending = requestAnimationFrame(frame);
}

function pause(time = state.position) {
  cancelAnimationFrame(pending);
  state.playing = false;
  seek(time);
}

// Returns the next or previous time at which an action begins or ends.
function eventTime(direction) {
  const times = [0, timeline.data.end, ...found.blocks.flat().flatMap((a) => [a.begin, a.end])];
  const slack = 1e-6 * found.time;
  const ahead = times.filter((time) => (time - state.position) * direction > slack);
  return direction > 0 ? Math.min(...ahead, timeline.data.end) : Math.max(...ahead, 0);
}

// Changes settings and shows what follows from them; the animation stays at its share of the step.
function set(changes) {
  const share = timeline.data ? state.position / timeline.data.end : 0;
  Object.assign(state, changes);
  found = simulated(state);
  moves = movesOf(found);
  const data = timelineData(state, found);
  state.position = share * data.end;
  timeline.now = state.position;
  timeline.show(data);
  showFigures();
  showControls();
  drawTime();
}

function showFigures() {
  const figures = figuresOf(state, found);
  for (const name of ["time", "speedup", "bubble", "memory"]) byId(name).textContent = figures[name];
  byId("time-note").textContent = `${figures.oneDevice} on one device`;
  byId("speedup-note").textContent = `of ${state.K} device${state.K === 1 ? "" : "s"} over one`;
  byId("bubble-note").textContent = bubbleNote(state, found);
  byId("memory-note").textContent = memoryNote(state, found);
  byId("timeline").setAttribute("aria-label", `Timeline: ${state.K} stages, ${state.M} micro-batches,
    step ${figures.time}, bubble ${figures.bubble}, at most ${figures.memory}`);
  const code = [`chunks=${state.M}`, `checkpoint="${state.checkpoint}"`];
  if (state.schedule !== "gpipe") code.push(`schedule="${state.schedule}"`);
  byId("code").textContent = `model = GPipe(layers, balance=[...], ${code.join(", ")})`;
  const short = (value) => (Array.isArray(value) ? value.map(short) : Number(value.toPrecision(6)));
  const { schedule, num_stages: stages, num_microbatches: count, checkpoint, ...others } = argumentsOf(state);
  const given = Object.entries(others).map(([name, value]) => {
    const isEqual = Array.isArray(value) && value.every((each) => each === value[0]);
    return `${name}=${JSON.stringify(short(isEqual ? value[0] : value)).replaceAll(",", ", ")}`;
  });
  byId("simulate").textContent =
    `simulate("${schedule}", ${stages}, ${count}, checkpoint="${checkpoint}", ${given.join(", ")})`;
}

function showControls() {
  for (const name of ["K", "M", "latency", "overhead"]) {
    byId(name).value = state[name];
    byId(`${name}-value`).textContent = name.length > 1 ? `${state[name]} ms` : state[name];
  }
  byId("checkpoint").value = state.checkpoint;
  byId("schedule").value = state.schedule;
  byId("about-schedule").textContent = SCHEDULE_NOTES[state.schedule];
  const times = timesByCount();
  const [longest, best] = [Math.max(...times), bestCount(times)];
  byId("best").textContent = `M = ${state.M}: ${times[state.M - 1].toFixed(1)} ms. Best (▼): M = ${best},
    ${times[best - 1].toFixed(1)} ms. Overhead is a fixed time of each action, latency of each transfer.`;
  byId("counts").replaceChildren(
    ...times.map((time, i) => {
      const bar = document.createElement("i");
      bar.style.height = `${(100 * time) / longest}%`;
      bar.classList.toggle("current", i + 1 === state.M);
      bar.classList.toggle("best", i + 1 === best);
      return bar;
    }),
  );
  showBalance();
  const isChapter = Object.entries(settingsOf(state.caption)).every(([name, value]) => `${value}` === `${state[name]}`);
  byId("differs").textContent = isChapter ? "" : "You changed the settings; the text describes those of its chapter.";
  fillLegend(byId("legend"), [
    ...kindEntries(new Set(found.blocks.flat().map((a) => a.kind))),
    ["idle", "idle: the bubble"],
    ["critical-bar", "critical path"],
    ["memory-area", "memory: what is kept for backwards"],
    ["accent", "update", true],
  ]);
}

// The step's time for each number of micro-batches.
const timesByCount = () => range(32).map((i) => simulate(argumentsOf({ ...state, M: i + 1 })).time);
const bestCount = (times) => times.indexOf(Math.min(...times)) + 1;

function showBalance() {
  const box = byId("balance");
  while (box.children.length > state.K) box.lastChild.remove();
  while (box.children.length < state.K) box.append(balanceSlider(box.children.length));
  const shares = sharesOf(state.costs.slice(0, state.K));
  [...box.children].forEach((each, stage) => {
    const [slider, text] = each.children;
    const share = `${shares[stage]}%`;
    slider.setAttribute("aria-valuenow", state.costs[stage]);
    slider.setAttribute("aria-valuetext", `cost ${state.costs[stage]}, ${share} of the work`);
    slider.firstChild.style.height = `${(100 * state.costs[stage]) / COSTS.most}%`;
    text.textContent = share;
  });
}

function balanceSlider(stage) {
  const box = document.createElement("div");
  box.innerHTML = `<div role="slider" tabindex="0" aria-orientation="vertical" aria-label="Cost of stage ${stage}"
    aria-valuemin="${COSTS.least}" aria-valuemax="${COSTS.most}"><i></i></div><span></span>`;
  const slider = box.firstChild;
  const setCost = (value) => {
    const cost = Math.min(COSTS.most, Math.max(COSTS.least, Math.round(value / COSTS.step) * COSTS.step));
    set({ costs: state.costs.map((old, i) => (i === stage ? Number(cost.toFixed(1)) : old)) });
  };
  const drag = (event) => {
    const { bottom, height } = slider.getBoundingClientRect();
    if (event.buttons) setCost(((bottom - event.clientY) / height) * COSTS.most);
  };
  slider.addEventListener("pointerdown", (event) => {
    slider.setPointerCapture(event.pointerId);
    drag(event);
  });
  slider.addEventListener("pointermove", drag);
  slider.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 5, PageDown: -5 };
    const ends = { Home: COSTS.least, End: COSTS.most };
    if (!(event.key in steps || event.key in ends)) return;
    event.preventDefault();
    setCost(ends[event.key] ?? state.costs[stage] + steps[event.key] * COSTS.step);
  });
  return box;
}

const settingsOf = (caption) => ({ ...DEFAULTS, ...TOUR[caption].settings });

function showCaption(index, plays = true) {
  const caption = TOUR[(state.caption = index)];
  set(settingsOf(index));
  const never = simulated({ ...state, checkpoint: "never" });
  byId("tour-title").textContent = caption.title;
  const text = caption.text({
    ...figuresOf(state, found),
    memoryNever: bytesText(never.peak),
    timeNever: `${never.time.toFixed(1)} ms`,
    slower: `${Math.round(100 * (found.time / never.time - 1))}%`,
    best: bestCount(timesByCount()),
  });
  byId("tour-text").innerHTML = text.replace(/(\d) (?=ms|×|[GM]iB)/g, "$1\u00a0"); // no new line before a unit
  [...byId("steps").children].forEach((item, i) => {
    item.firstChild.setAttribute("aria-current", i === index ? "step" : "false");
  });
  byId("previous").disabled = index === 0;
  byId("next").disabled = index === TOUR.length - 1;
  pause((caption.from || 0) * timeline.data.end);
  if (plays && !motion.matches) play();
  // On a phone, the caption moves to the top, with the picture below it.
  if (plays) byId("tour").scrollIntoView({ block: timeline.isNarrow ? "start" : "nearest" });
}

function setUp() {
  TOUR.forEach(({ title }, i) => {
    const item = document.createElement("li");
    item.innerHTML = `<button type="button" aria-label="${i + 1}: ${title}">${i + 1}</button>`;
    item.firstChild.addEventListener("click", () => showCaption(i));
    byId("steps").append(item);
  });
  const on = (id, type, react) => byId(id).addEventListener(type, (event) => react(event.target));
  on("previous", "click", () => showCaption(state.caption - 1));
  on("again", "click", () => showCaption(state.caption));
  on("next", "click", () => showCaption(state.caption + 1));
  for (const name of ["K", "M", "latency", "overhead"]) on(name, "input", ({ value }) => set({ [name]: Number(value) }));
  for (const name of ["checkpoint", "schedule"]) on(name, "change", ({ value }) => set({ [name]: value }));
  on("equal", "click", () => set({ costs: EQUAL }));
  on("play", "click", () => (state.playing ? pause() : play()));
  on("step", "click", () => pause(eventTime(1)));
  on("back", "click", () => pause(eventTime(-1)));
  on("scrub", "input", ({ value }) => pause((timeline.data.end * value) / 1000));
  on("speed", "change", ({ value }) => (state.speed = Number(value)));
  showCaption(0, false);
  setUpButtons(timeline, drawTime);
  new ResizeObserver(drawFlow).observe(flow.parentElement);
}

// For tests: settings and figures.
window.page = {
  state, timeline, set, seek, pause, showCaption, argumentsOf,
  shown: () => Object.fromEntries(["time", "speedup", "bubble", "memory"].map((id) => [id, byId(id).textContent])),
  simulation: () => found,
};
setUp();
