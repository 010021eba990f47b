"use strict";
// Builds the panels of a token grid's page from its packed data, and shows the note of the cell under the pointer.
(async () => {
  const bytes = Uint8Array.from(atob(document.getElementById("grid").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const grid = JSON.parse(await new Response(unpacked).text());
  const note = document.getElementById("note");
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const string = (table, row, column) => (table ? grid.strings[table[row][column]] : "");

  function colour(panel, value) {
    const share = Math.min(Math.max((value - panel.low) / (panel.high - panel.low), 0), 1);
    const place = share * (panel.colours.length - 1), below = Math.min(Math.floor(place), panel.colours.length - 2);
    const [a, b] = [channels(panel.colours[below]), channels(panel.colours[below + 1])];
    return a.map((channel, i) => Math.round(channel + (b[i] - channel) * (place - below)));
  }

  function paint(cell, panel, value) {
    if (value === null) return cell.classList.add("blank");
    const [red, green, blue] = colour(panel, value);
    cell.style.background = `rgb(${red},${green},${blue})`;
    cell.style.color = 0.299 * red + 0.587 * green + 0.114 * blue < 140 ? "#fff" : "#1f2933";
  }

  function tableOf(panel, number) {
    const small = !panel.texts || panel.columns.length > 120;
    const table = element("table", undefined, small ? "cells small" : "cells"), body = table.createTBody();
    for (let row = panel.rows.length - 1; row >= 0; row--) {
      const line = body.insertRow();
      line.append(element("th", panel.rows[row]));
      for (let column = 0; column < panel.columns.length; column++) {
        const cell = line.insertCell();
        if (!small) cell.textContent = string(panel.texts, row, column);
        cell.dataset.at = `${number},${row},${column}`;
        paint(cell, panel, panel.values[row][column]);
      }
    }
    for (const [row, column] of panel.outlined)
      body.rows[panel.rows.length - 1 - row].cells[column + 1].classList.add("outlined");
    const foot = table.createTFoot().insertRow();
    foot.append(element("th"), ...panel.columns.map((label) => element("th", label)));
    return table;
  }

  function place(panel, number) {
    const section = element("section"), scroll = element("div", undefined, "scroll"), key = element("div", undefined, "key");
    const bar = element("i");
    bar.style.background = `linear-gradient(90deg, ${panel.colours.join(", ")})`;
    key.append(element("span", panel.ends[0]), bar, element("span", panel.ends[1]));
    scroll.append(tableOf(panel, number));
    section.append(element("h2", panel.name), key, scroll,
                   element("p", `up: ${panel.row_name} · across: ${panel.column_name}`, "axes"));
    document.getElementById("panels").append(section);
  }

  function show(cell) {
    const [number, row, column] = cell.dataset.at.split(",").map(Number), panel = grid.panels[number];
    const value = panel.values[row][column];
    const head = `${panel.row_name} ${panel.rows[row]}, ${panel.columns[column]}`;
    const body = string(panel.notes, row, column) || string(panel.texts, row, column);
    note.replaceChildren(element("b", head), `${panel.name}: ${value === null ? "none" : value}`.replace("-", "−"),
                         body ? `\n${body}` : "");
    note.hidden = false;
    const box = cell.getBoundingClientRect(), own = note.getBoundingClientRect();
    note.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 12))}px`;
    note.style.top = `${box.bottom + own.height + 8 < innerHeight ? box.bottom + 6 : Math.max(box.top - own.height - 6, 4)}px`;
  }

  document.getElementById("panels").addEventListener("mouseover", (event) => {
    const cell = event.target.closest("td[data-at]");
    if (cell) show(cell);
    else note.hidden = true;
  });
  document.getElementById("panels").addEventListener("mouseleave", () => { note.hidden = true; });
  grid.panels.forEach(place);
})();
