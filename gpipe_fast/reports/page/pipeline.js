// The page to play with: settings, their simulation, the animation, and the tour.
"use strict";

// The simulated model, for a whole mini-batch on one device: milliseconds and bytes.
const MODEL = { forward: 100, backward: 200, activations: 4 * 2 ** 30, boundary: 100 * 2 ** 20 };
const STEP_SECONDS = 12; // of the animation
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

const state = { ...DEFAULTS, position: 0, playing: false, caption: 0 };
const motion = matchMedia("(prefers-reduced-motion: reduce)");
const timeline = new Timeline(byId("timeline"), byId("tooltip"), (time) => seek(time));
const clock = () => performance.now() / 1000;
let found; // the simulation of the settings
let pending; // the next frame of the animation

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

const isPresent = (a) => a.begin <= state.position && state.position < a.end;

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
    const rate = timeline.data.end / STEP_SECONDS;
    if (motion.matches) {
      if (now - before >= 0.5) [before] = [now, seek(eventTime(1))];
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
  showCaption(0, false);
  setUpButtons(timeline, drawTime);
}

// For tests: settings and figures.
window.page = {
  state, timeline, set, seek, pause, showCaption, argumentsOf,
  shown: () => Object.fromEntries(["time", "speedup", "bubble", "memory"].map((id) => [id, byId(id).textContent])),
  simulation: () => found,
};
setUp();
