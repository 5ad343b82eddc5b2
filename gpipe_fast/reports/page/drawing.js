// The timeline of a step on a canvas: a row for each stage, a block for each action, and the memory below it.
// It draws the data that gpipe_fast/reports/page/__init__.py describes, and only the part that is visible.
"use strict";

const MEANINGS = {
  F: "forward",
  R: "recompute",
  B: "backward",
  I: "input gradient",
  W: "weight gradients",
  SEND_F: "sends the boundary activation",
  RECV_F: "receives the boundary activation",
  SEND_B: "sends the boundary gradient",
  RECV_B: "receives the boundary gradient",
};
const FONT = '"Inter", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif';
const AXIS = 24;
const FADED = 0.75; // the opacity of what is still to come, whose labels stay readable
const CAPTION = 20;
const byId = (id) => document.getElementById(id);
const isTransfer = (kind) => kind.length > 1;

// Returns the index of the first item of a sorted list that ends after a time.
function firstAfter(items, time) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Returns the least number of the form 1, 2 or 5 times a power of ten that is not below a number.
function roundUp(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((digit) => digit * power).find((found) => found >= number * (1 - 1e-9));
}

// Returns a function that writes a time of the data as text, in the unit that suits the length of the step.
function timeFormat(length, unit) {
  const scales = unit === "s" ? [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]] : [[1, unit]];
  const [scale, name] = scales.find(([each]) => length >= each) || scales[scales.length - 1];
  const digits = Math.max(0, 3 - Math.floor(Math.log10(length / scale || 1)) - 1);
  return (time, extra = 0) => `${(time / scale).toFixed(Math.min(digits + extra, 6))} ${name}`;
}

function bytesText(bytes) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(bytes, 1)) / 10));
  const digits = power && bytes / 1024 ** power < 10 ? 1 : 0;
  return `${(bytes / 1024 ** power).toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

class Timeline {
  // `pick` is called with the time of a click, and while one drags over a timeline that is not zoomed.
  constructor(canvas, tooltip, pick = null) {
    Object.assign(this, { canvas, tooltip, pick, now: null, isPlaying: false });
    this.selected = null;
    this.pointers = new Map();
    this.context = canvas.getContext("2d");
    this.readColours();
    new ResizeObserver(() => this.data && this.resize()).observe(canvas.parentElement);
    for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"]) {
      canvas.addEventListener(name, (event) => this.onPointer(event));
    }
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("blur", () => this.select(null));
  }

  readColours() {
    const style = getComputedStyle(this.canvas);
    const cache = new Map();
    this.colour = (name) => {
      if (!cache.has(name)) cache.set(name, style.getPropertyValue(`--${name}`).trim() || "#888");
      return cache.get(name);
    };
    this.hatches = new Map();
  }

  show(data, keepView = false) {
    this.data = data;
    this.whole = [data.begin, data.end];
    if (!keepView || !this.view) this.view = [...this.whole];
    for (const stage of data.stages) {
      for (const items of [stage.actions, stage.waits, stage.idle]) items.sort((a, b) => a.begin - b.begin);
    }
    this.peaks = data.stages.map(({ memory }) => memory.reduce((peak, [, bytes]) => Math.max(peak, bytes), 0));
    const numbers = data.stages.flatMap(({ actions }) => actions.map((a) => a.microbatch));
    const longest = numbers.reduce((a, b) => Math.max(a, b), 0);
    const widthOf = (text, size) => {
      this.context.font = `${size}px ${FONT}`;
      return this.context.measureText(text).width;
    };
    [this.nameWidth, this.numberWidth] = [widthOf(`B${longest}`, 12) + 4, widthOf(longest, 10) + 3];
    this.text = timeFormat(data.end - data.begin, data.unit);
    this.select(null);
    this.resize();
  }

  resize() {
    const { canvas, data } = this;
    this.width = canvas.parentElement.clientWidth;
    this.isNarrow = this.width < 620;
    const count = data.stages.length;
    this.left = this.isNarrow ? 1 : 104;
    this.right = this.width - (this.isNarrow ? 1 : 12);
    const isRoomy = !this.isNarrow && count <= 8;
    this.bar = count <= 4 ? (isRoomy ? 46 : 34) : isRoomy ? 32 : count <= 8 ? 26 : 20;
    this.memory = Math.max(...this.peaks) > 0 ? Math.round(this.bar * 0.65) : 0;
    this.header = this.isNarrow ? 16 : 0;
    this.pitch = this.header + this.bar + this.memory + (count <= 4 ? 16 : 12);
    this.height = CAPTION + count * this.pitch + AXIS;
    this.ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(this.width * this.ratio);
    canvas.height = Math.round(this.height * this.ratio);
    canvas.style.height = `${this.height}px`;
    this.draw();
  }

  x(time) {
    const [begin, end] = this.view;
    return this.left + ((time - begin) / (end - begin || 1)) * (this.right - this.left);
  }

  timeAt(x) {
    const [begin, end] = this.view;
    return begin + ((x - this.left) / (this.right - this.left)) * (end - begin);
  }

  top(row) {
    return CAPTION + row * this.pitch + this.header;
  }

  get isWhole() {
    return this.view[1] - this.view[0] >= (this.whole[1] - this.whole[0]) * 0.9999;
  }

  // Zooms by a factor around a time, by default the middle.
  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const length = this.whole[1] - this.whole[0];
    const wanted = Math.min(length, Math.max(length * 1e-4, (this.view[1] - this.view[0]) / factor));
    const part = (around - this.view[0]) / (this.view[1] - this.view[0]);
    this.moveTo(around - part * wanted, wanted);
  }

  pan(time) {
    this.moveTo(this.view[0] + time, this.view[1] - this.view[0]);
  }

  fit() {
    this.moveTo(this.whole[0], this.whole[1] - this.whole[0]);
  }

  moveTo(begin, length) {
    const first = Math.min(Math.max(begin, this.whole[0]), this.whole[1] - length);
    this.view = [first, first + length];
    this.draw();
  }

  draw() {
    const { context: c } = this;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = this.colour("panel");
    c.fillRect(0, 0, this.width, this.height);
    c.textBaseline = "middle";
    if (this.now === null) this.drawPart(this.left, this.right, 1);
    else {
      const x = Math.min(Math.max(this.x(this.now), this.left), this.right);
      this.drawPart(x, this.right, this.isPlaying ? FADED : 1);
      this.drawPart(this.left, x, 1);
      c.fillStyle = this.colour("accent");
      if (x === this.x(this.now)) c.fillRect(x - 1, CAPTION - 4, 2, this.height - CAPTION - AXIS + 4);
    }
    this.drawNames();
    this.drawAxis();
    if (this.selected) this.drawSelected();
  }

  drawPart(left, right, alpha) {
    if (right <= left) return;
    const { context: c } = this;
    c.save();
    c.beginPath();
    c.rect(left, 0, right - left, this.height);
    c.clip();
    c.globalAlpha = alpha;
    this.data.stages.forEach((stage, row) => this.drawRow(stage, row));
    this.drawArrows(alpha);
    for (const [begin, end, name] of this.data.between || []) this.drawBand(begin, end, name || "loss");
    c.restore();
  }

  // Yields the visible items of a sorted list, with their left and right.
  *visible(items) {
    const limit = this.view[1];
    for (let i = firstAfter(items, this.view[0]); i < items.length && items[i].begin < limit; i++) {
      yield [items[i], this.x(items[i].begin), this.x(items[i].end)];
    }
  }

  drawRow(stage, row) {
    const { context: c, bar } = this;
    const top = this.top(row);
    c.fillStyle = this.colour("idle");
    const [begin, end] = [this.x(this.data.begin), this.x(this.data.end)];
    c.fillRect(Math.max(begin, this.left), top, Math.min(end, this.right) - Math.max(begin, this.left), bar);
    for (const [idle, left, right] of this.visible(stage.idle)) {
      c.fillStyle = this.colour(`cause-${idle.cause.replaceAll(" ", "-")}`);
      c.fillRect(left, top, right - left, bar);
    }
    c.fillStyle = this.hatch("line");
    for (const [, left, right] of this.visible(stage.waits)) c.fillRect(left, top, right - left, bar / 4);
    for (const [idle, left, right] of this.visible(stage.idle)) {
      this.label(idle.cause, left, right, top + bar / 2 + (stage.waits.length ? bar / 8 : 0), "on-idle", 11);
    }
    let drawn = -1;
    for (const [action, left, right] of this.visible(stage.actions)) {
      if (right - drawn < 0.3 && !action.critical) continue; // several per pixel
      drawn = right;
      this.drawBlock(action, left, right, top);
    }
    if (this.memory) this.drawMemory(stage, top + bar);
  }

  drawBlock(action, left, right, top) {
    const { context: c, bar } = this;
    const width = right - left;
    if (width <= 0) return;
    const inset = isTransfer(action.kind) ? bar * 0.3 : 0;
    const gap = width > 4 ? 1 : 0;
    c.fillStyle = this.colour(isTransfer(action.kind) ? "transfer" : action.kind);
    c.fillRect(left, top + inset, Math.max(width - gap, 0.7), bar - 2 * inset);
    if (action.second) {
      c.fillStyle = this.colour("on-block");
      c.fillRect(left, top, width - gap, 2);
    }
    if (action.critical) {
      c.fillStyle = this.colour("critical-bar");
      c.fillRect(left, top + bar - 4, Math.max(width, 1), 4);
    }
    if (isTransfer(action.kind)) return;
    const middle = top + bar / 2 - (action.critical ? 1 : 0);
    // All names of blocks of one width look alike: in full, only the number, or nothing.
    if (width < this.numberWidth) return;
    if (width < this.nameWidth) this.label(`${action.microbatch}`, left, right, middle, "on-block", 10, 1);
    else this.label(`${action.kind}${action.microbatch}`, left, right, middle, "on-block", 12, 1);
  }

  // Writes a text into the middle of the visible part of a block, if it fits.
  label(text, left, right, y, colour, size, padding = 4) {
    const { context: c } = this;
    const [from, to] = [Math.max(left, this.left), Math.min(right, this.right)];
    if (to - from < size * 0.5 + padding) return;
    c.font = `${size}px ${FONT}`;
    if (c.measureText(text).width + padding > to - from) return;
    c.fillStyle = this.colour(colour);
    c.textAlign = "center";
    const { globalAlpha } = c;
    c.globalAlpha = 1; // a faded block keeps its label
    c.fillText(text, (from + to) / 2, y);
    c.globalAlpha = globalAlpha;
  }

  drawMemory(stage, top) {
    const { context: c, memory } = this;
    const [highest, base] = [Math.max(...this.peaks), top + memory + 2];
    const y = (bytes) => base - (bytes / highest) * (memory - 2);
    const points = [...stage.memory, [this.data.end, 0]];
    c.beginPath();
    c.moveTo(this.x(this.data.begin), base);
    let before = 0;
    for (const [time, bytes] of points) {
      const x = Math.min(Math.max(this.x(time), this.left - 5), this.right + 5);
      c.lineTo(x, y(before));
      c.lineTo(x, y(bytes));
      before = bytes;
    }
    c.lineTo(this.x(this.data.end), base);
    c.fillStyle = this.colour("memory-area");
    c.fill();
    c.strokeStyle = this.colour("memory");
    c.lineWidth = 1;
    c.stroke();
  }

  drawArrows(alpha) {
    const { context: c } = this;
    const [begin, end] = this.view;
    const arrows = this.data.arrows.filter(({ from, to }) => to[1] >= begin && from[1] <= end);
    const room = ((this.right - this.left) * this.data.stages.length) / Math.max(1, arrows.length);
    c.globalAlpha = alpha * Math.min(0.75, Math.max(0.22, room / 60));
    c.lineWidth = 1;
    for (const { from, to, critical } of arrows) {
      const isDown = to[0] > from[0];
      const colour = this.colour(critical ? "critical" : "arrow");
      const [x1, y1] = [this.x(from[1]), this.top(from[0]) + (isDown ? this.bar : 0)];
      const [x2, y2] = [this.x(to[1]), this.top(to[0]) + (isDown ? 0 : this.bar)];
      const bend = (y2 - y1) / 2;
      c.strokeStyle = c.fillStyle = colour;
      c.beginPath();
      c.moveTo(x1, y1);
      c.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
      c.stroke();
      if (room < 14) continue;
      c.beginPath();
      c.moveTo(x2, y2);
      c.lineTo(x2 - 3, y2 - Math.sign(bend) * 6);
      c.lineTo(x2 + 3, y2 - Math.sign(bend) * 6);
      c.fill();
    }
    c.globalAlpha = alpha;
  }

  // Draws a hatched band over all rows: the caller's loss, or the update.
  drawBand(begin, end, name) {
    const { context: c } = this;
    const [left, right] = [this.x(begin), this.x(end)];
    const [top, bottom] = [CAPTION - 4, this.height - AXIS - 6];
    c.fillStyle = this.colour("panel");
    c.fillRect(left, top, right - left, bottom - top);
    c.fillStyle = this.hatch("accent");
    c.fillRect(left, top, right - left, bottom - top);
    if (right - left < 14) return; // no room for its name
    c.save();
    c.font = `600 12px ${FONT}`;
    c.textAlign = "center";
    c.translate((left + right) / 2, (top + bottom) / 2);
    c.rotate(-Math.PI / 2);
    const width = c.measureText(name).width + 12;
    c.fillStyle = this.colour("panel");
    c.fillRect(-width / 2, (left - right) / 2, width, right - left);
    c.fillStyle = this.colour("accent");
    c.fillText(name, 0, 0.5);
    c.restore();
  }

  hatch(name) {
    if (!this.hatches.has(name)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const c = tile.getContext("2d");
      c.strokeStyle = this.colour(name);
      c.beginPath();
      for (const shift of [-6, 0, 6]) {
        c.moveTo(shift, 6);
        c.lineTo(shift + 6, 0);
      }
      c.stroke();
      this.hatches.set(name, this.context.createPattern(tile, "repeat"));
    }
    return this.hatches.get(name);
  }

  drawNames() {
    const { context: c } = this;
    this.data.stages.forEach((stage, row) => {
      const top = this.top(row);
      const peak = this.peaks[row] ? `max ${bytesText(this.peaks[row])}` : "";
      const write = (text, x, y, colour, weight = "") => {
        c.font = `${weight} ${weight ? 12 : 11}px ${FONT}`;
        c.fillStyle = this.colour(colour);
        c.fillText(text, x, y);
      };
      c.textAlign = "left";
      if (this.isNarrow) {
        c.font = `600 12px ${FONT}`;
        const after = c.measureText(stage.name).width + 9;
        c.font = `11px ${FONT}`;
        const [note, width] = [`${stage.note || ""}  `, c.measureText(`${stage.note || ""}  ${peak}`).width];
        c.fillStyle = this.colour("panel");
        c.fillRect(0, top - 15, after + width + 3, 13);
        write(stage.name, 1, top - 8, "ink", "600");
        write(note, after, top - 8, "muted");
        write(peak, after + c.measureText(note).width, top - 8, "memory");
        return;
      }
      const hasRoom = this.bar >= 30 && stage.note;
      write(stage.name, 0, top + this.bar / 2 - (hasRoom ? 7 : 0), "ink", "600");
      if (hasRoom) write(stage.note, 0, top + this.bar / 2 + 8, "muted");
      write(peak, 0, top + this.bar + this.memory / 2 + 2, "memory");
    });
  }

  drawAxis() {
    const { context: c } = this;
    const y = this.height - AXIS;
    const isSeconds = this.data.unit === "s";
    const unit = isSeconds ? this.text(1).split(" ")[1] : this.data.unit;
    const scale = { s: 1, ms: 1e-3, "µs": 1e-6 }[isSeconds ? unit : "s"];
    const step = roundUp((((this.view[1] - this.view[0]) / scale) * 70) / (this.right - this.left));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    c.fillStyle = this.colour("line");
    c.fillRect(this.left, y, this.right - this.left, 1);
    c.font = `11px ${FONT}`;
    const first = Math.ceil((this.view[0] - this.data.begin) / scale / step - 1e-9);
    for (let tick = first; ; tick++) {
      const x = this.x(this.data.begin + tick * step * scale);
      if (x > this.right + 0.5) break;
      c.fillStyle = this.colour("line");
      c.fillRect(x, y, 1, 4);
      c.fillStyle = this.colour("muted");
      const text = `${(tick * step).toFixed(digits)} ${tick === first ? unit : ""}`.trim();
      const half = c.measureText(text).width / 2;
      c.textAlign = x - half < this.left ? "left" : x + half > this.right ? "right" : "center";
      c.fillText(text, x, y + 13);
    }
  }

  drawSelected() {
    const { context: c } = this;
    const { row, item } = this.selected;
    const [left, right] = [this.x(item.begin), this.x(item.end)];
    c.strokeStyle = this.colour("ink");
    c.lineWidth = 2;
    c.strokeRect(left, this.top(row), Math.max(right - left, 2), this.bar);
  }

  // Returns what is drawn at a point: its row, the item, and a text about it.
  hit(x, y) {
    const row = Math.floor((y - CAPTION) / this.pitch);
    const stage = this.data.stages[row];
    if (!stage || x < this.left || x > this.right) return null;
    const within = y - this.top(row);
    const time = this.timeAt(x);
    if (this.memory && within > this.bar) {
      const bytes = stage.memory.reduce((found, [begin, each]) => (begin <= time ? each : found), 0);
      return { row, item: null, text: `${stage.name} keeps ${bytesText(bytes)}` };
    }
    const slack = (this.view[1] - this.view[0]) / (this.right - this.left);
    for (const [type, items] of [["action", stage.actions], ["wait", stage.waits], ["idle", stage.idle]]) {
      const item = items[firstAfter(items, time - slack)];
      const isLater = !item || item.begin > time + (type === "action" ? slack : 0);
      if (!isLater) return { row, item, text: this.describe(type, stage, item) };
    }
    return null;
  }

  describe(type, stage, item) {
    const [begin, end] = [item.begin - this.data.begin, item.end - this.data.begin];
    const times = `${this.text(end - begin, 1)}, from ${this.text(begin, 1)}`;
    if (type === "wait") return `${stage.name} waits for ${item.name}: ${times}`;
    if (type === "idle") return `${stage.name} is idle (${item.cause}): ${times}`;
    const what = `${item.name}: stage ${parseInt(item.name)}, ${MEANINGS[item.kind] || item.kind}`;
    return `${what} of micro-batch ${item.microbatch}, ${times}${item.critical ? "; on the critical path" : ""}`;
  }

  select(found, x = null, y = null) {
    const before = this.selected && this.selected.item;
    this.selected = found && found.item ? found : null;
    this.tooltip.hidden = !found;
    if (found) {
      this.tooltip.textContent = found.text;
      const { offsetWidth: width, offsetHeight: height } = this.tooltip;
      const left = x ?? (this.x(found.item.begin) + this.x(found.item.end)) / 2;
      const below = (y ?? this.top(found.row) + this.bar) + 14;
      this.tooltip.style.left = `${Math.min(Math.max(left - width / 2, 0), this.width - width)}px`;
      this.tooltip.style.top = `${below + height > this.height ? below - height - 40 : below}px`;
    }
    if (before !== (this.selected && this.selected.item)) this.draw();
  }

  // Selects the next or previous action of the selected row, or one of another row.
  step(count, rows = 0) {
    const last = this.data.stages.length - 1;
    const row = this.selected ? Math.min(Math.max(this.selected.row + rows, 0), last) : 0;
    const stage = this.data.stages[row];
    const from = this.selected ? this.selected.item.begin : this.view[0];
    let index = this.selected && !rows ? stage.actions.indexOf(this.selected.item) + count : 0;
    if (!this.selected || rows) index = firstAfter(stage.actions, from);
    const item = stage.actions[Math.min(Math.max(index, 0), stage.actions.length - 1)];
    if (!item) return;
    const length = this.view[1] - this.view[0];
    if (item.begin < this.view[0] || item.end > this.view[1]) this.moveTo(item.begin - length / 3, length);
    this.select({ row, item, text: this.describe("action", stage, item) });
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const tenth = (this.view[1] - this.view[0]) / 10;
    const actions = {
      "+": () => this.zoom(1.5),
      "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5),
      0: () => this.fit(),
      ArrowLeft: () => this.pan(-tenth),
      ArrowRight: () => this.pan(tenth),
      ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1),
      ",": () => this.step(-1),
      ".": () => this.step(1),
      Escape: () => this.select(null),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  onWheel(event) {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      if (this.isWhole) return;
      this.pan((event.deltaX / (this.right - this.left)) * (this.view[1] - this.view[0]));
    } else {
      if (this.isWhole && (event.deltaY > 0 || this.pick) && !event.ctrlKey) return; // the page scrolls
      this.zoom(Math.exp(-event.deltaY / 400), this.timeAt(event.offsetX));
    }
    event.preventDefault();
  }

  onPointer(event) {
    const at = { x: event.offsetX, y: event.offsetY };
    const before = this.pointers.get(event.pointerId);
    if (event.type === "pointerdown") {
      this.canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, { ...at, moved: 0 });
      this.select(null);
    } else if (event.type === "pointermove" && before) {
      const moved = before.moved + Math.abs(at.x - before.x);
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
      this.pointers.set(event.pointerId, { ...at, moved });
      if (others.length) this.pinch(before, at, others[0][1]);
      else if (this.pick && this.isWhole) this.pick(this.timeAt(at.x));
      else this.pan(this.timeAt(before.x) - this.timeAt(at.x));
    } else if (event.type === "pointermove") {
      this.select(this.hit(at.x, at.y), at.x, at.y);
    } else {
      if (event.type === "pointerup" && before && before.moved < 4) {
        if (this.pick) this.pick(this.timeAt(at.x));
        this.select(this.hit(at.x, at.y), at.x, at.y);
      }
      if (event.type === "pointerleave") this.select(null);
      this.pointers.delete(event.pointerId);
    }
  }

  pinch(before, after, other) {
    const [old, now] = [before, after].map((each) => Math.hypot(each.x - other.x, each.y - other.y));
    if (old > 0 && now > 0) this.zoom(now / old, this.timeAt((after.x + other.x) / 2));
  }
}

// Returns the legend's entries of those kinds that compute.
function kindEntries(kinds) {
  const text = (kind) => MEANINGS[kind] + (kind === "I" ? ", which the previous stage waits for" : "");
  return ["F", "R", "B", "I", "W"].filter((kind) => kinds.has(kind)).map((kind) => [kind, text(kind)]);
}

// Fills a legend: [colour, text, whether it is hatched] for each entry.
function fillLegend(element, entries) {
  element.replaceChildren(
    ...entries.map(([colour, text, isHatched]) => {
      const entry = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = isHatched ? "swatch hatched" : "swatch";
      swatch.style.setProperty("--swatch", `var(--${colour})`);
      entry.append(swatch, text);
      return entry;
    }),
  );
}

// Connects what both pages have: the buttons that zoom, and the system's light or dark colours.
function setUpButtons(timeline, redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    timeline.readColours();
    redraw();
  });
  byId("zoom-in").addEventListener("click", () => timeline.zoom(2));
  byId("zoom-out").addEventListener("click", () => timeline.zoom(0.5));
  byId("zoom-fit").addEventListener("click", () => timeline.fit());
}
