// The report of a recorded step: its timeline and its tables.
"use strict";

const CAUSES = ["fill and drain", "imbalance", "transfer", "recompute", "Python", "host"];
const data = JSON.parse(byId("data").textContent);
const timeline = new Timeline(byId("timeline"), byId("tooltip"));

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function copyButton(code) {
  const button = element("button", "Copy");
  button.type = "button";
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(code);
    if (document.execCommand("copy")) button.textContent = "Copied";
  });
  return button;
}

function tableOf({ caption, headers, rows, code = [] }) {
  const table = element("table");
  const cells = (name, values) => {
    const row = element("tr");
    values.forEach((value, column) => {
      const isCode = code.includes(column) && value !== "";
      const cell = element(name, isCode && name === "td" ? "" : value, isCode ? "code" : "");
      if (isCode && name === "td") {
        const text = element("code", value);
        cell.append(text, copyButton(text));
      }
      row.append(cell);
    });
    return row;
  };
  table.append(element("caption", caption), cells("th", headers), ...rows.map((row) => cells("td", row)));
  const panel = element("section", "", "panel");
  panel.append(table);
  return panel;
}

function legendEntries() {
  const actions = data.stages.flatMap((stage) => stage.actions);
  const [kinds, causes] = [new Set(), new Set()];
  for (const { kind } of actions) kinds.add(kind);
  for (const stage of data.stages) for (const { cause } of stage.idle) causes.add(cause);
  const entries = kindEntries(kinds);
  if ([...kinds].some(isTransfer)) entries.push(["transfer", "send or receive"]);
  if (actions.some((action) => action.critical)) entries.push(["critical-bar", "critical path"]);
  for (const cause of CAUSES.filter((each) => causes.has(each))) entries.push([`cause-${cause.replaceAll(" ", "-")}`, `idle: ${cause}`]);
  if (data.stages.some((stage) => stage.waits.length)) entries.push(["line", "waits for another stage", true]);
  if (data.between.length) entries.push(["accent", "loss, computed by the caller", true]);
  if (data.stages.some((stage) => stage.memory.length)) entries.push(["memory-area", "memory"]);
  return entries;
}

byId("headline").textContent = data.headline;
byId("timeline").setAttribute("aria-label", `Timeline of ${data.stages.length} stages. ${data.headline}`);
fillLegend(byId("legend"), legendEntries());
byId("tables").append(...data.tables.map(tableOf));
timeline.show(data);
byId("save").addEventListener("click", () => {
  const link = element("a");
  [link.download, link.href] = ["step.png", timeline.canvas.toDataURL()];
  link.click();
});
setUpButtons(timeline, () => timeline.draw());
