// Draws the charts of a report from the data that lies in the page, and lets people switch, filter and download them.
"use strict";
(() => {
  const MOST_ROWS = 300; // of a table in the page; the CSV file has them all
  let charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map(); // chart -> the running Vega view
  const chosen = new Map(); // chart -> {view, filters}

  const rowsOf = (chart) =>
    chart.values.length === 0 ? [] : chart.values[0].map((_, row) =>
      Object.fromEntries(chart.columns.map((name, column) => [name, chart.values[column][row]])));

  const distinct = (chart, name) => [...new Set(chart.values[chart.columns.indexOf(name)])];

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const text = { labelColor: colour("--ink"), titleColor: colour("--ink"), labelFontSize: 12, titleFontSize: 12 };
    const category = dark.matches
      ? ["#56b4e9", "#e69f00", "#00c798", "#ff8fc7", "#f0e442", "#ff7f50", "#b8a1ff", "#c9d1d9",
         "#8fd694", "#d98c5f", "#7ad7d0", "#ffb3b3", "#a0b8ff", "#d4c17f", "#e0a0ff", "#9aa5b1"]
      : ["#0072b2", "#b35900", "#00785a", "#a3447f", "#6b5b00", "#c0392b", "#5b4bb5", "#444c56",
         "#2e7d32", "#8d5524", "#00707a", "#ad1457", "#1a3fa0", "#7a6a00", "#7b1fa2", "#5f6b78"];
    return {
      background: "transparent", font: "system-ui, sans-serif",
      axis: { ...text, gridColor: colour("--line"), domainColor: colour("--line"), tickColor: colour("--line") },
      axisXDiscrete: { labelAngle: 0, labelOverlap: true },
      legend: { ...text, orient: "bottom", columns: window.innerWidth < 600 ? 1 : 4, labelLimit: 240 },
      view: { stroke: "transparent" }, rule: { color: colour("--soft") }, text: { color: colour("--ink") }, range: { category, ...shades() },
    };
  }

  // Nothing is as quiet as the paper, much is far from it: in the dark that is bright.
  function shades() {
    const more = dark.matches ? ["#1d2127", "#1f4e79", "#4a90c8", "#cfe8ff"] : ["#f1f4f8", "#9ecae1", "#3182bd", "#08306b"];
    const steps = { scheme: "blues", extent: dark.matches ? [0.75, 0.1] : [0.4, 1] };
    return { heatmap: more, ramp: more, ordinal: steps,
      diverging: dark.matches ? ["#ff8a75", "#1d2127", "#79b8ff"] : ["#b2182b", "#f1f4f8", "#2166ac"] };
  }

  // A method has one colour, dash and shape in all charts of the page; the legend names those that are drawn.
  const everyMethod = () => [...new Set(Object.values(charts).flatMap((chart) =>
    chart.columns.includes("method") ? distinct(chart, "method") : []))];
  let methods = everyMethod();

  function withSeries(spec, rows) {
    for (const layer of spec.layer ?? [spec]) {
      for (const channel of ["color", "strokeDash", "shape"]) {
        const given = layer.encoding[channel];
        if (!["nominal", "ordinal"].includes(given?.type)) continue;
        const here = [...new Set(rows.map((row) => row[given.field]))];
        const all = given.field === "method" ? methods : here;
        if (given.legend === null) {
          layer.encoding[channel] = { ...given, scale: { ...given.scale, domain: all } };
          continue;
        }
        const legend = { ...given.legend, values: all.filter((name) => here.includes(name)) };
        layer.encoding[channel] = { ...given, scale: { ...given.scale, domain: all }, legend };
      }
    }
    return spec;
  }

  function shownRows(key) {
    const { filters } = chosen.get(key);
    return rowsOf(charts[key]).filter((row) =>
      Object.entries(filters).every(([name, value]) => String(row[name]) === value));
  }

  async function draw(figure) {
    const key = figure.dataset.chart, chart = charts[key], picture = figure.querySelector(".picture");
    const { view } = chosen.get(key), rows = shownRows(key);
    const spec = {
      ...withSeries(structuredClone(chart.views[view]), rows), description: `${chart.title}. ${chart.text}`, config: theme(), width: "container",
      autosize: { type: "fit-x", contains: "padding" }, data: { values: rows },
    };
    drawn.get(key)?.finalize();
    const result = await vegaEmbed(picture, spec, { renderer: "svg", actions: false });
    drawn.set(key, result);
    // The marks of large charts would be thousands of stops for a screen reader: the table is for that.
    const svg = picture.querySelector("svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${chart.title}, by ${view}`);
    for (const inner of svg.querySelectorAll("[role],[aria-label],[aria-roledescription]")) {
      for (const name of ["role", "aria-label", "aria-roledescription"]) inner.removeAttribute(name);
    }
    picture.dataset.drawn = "true";
  }

  function control(label, values, pick) {
    const wrapper = document.createElement("label"), select = document.createElement("select");
    wrapper.append(`${label} `, select);
    for (const value of values) select.add(new Option(String(value), String(value)));
    select.addEventListener("change", () => pick(select.value));
    return wrapper;
  }

  function equip(figure) {
    const key = figure.dataset.chart, chart = charts[key], views = Object.keys(chart.views);
    const filters = Object.fromEntries(chart.filters.map((name) => [name, String(distinct(chart, name)[0])]));
    chosen.set(key, { view: views[0], filters });
    const controls = figure.querySelector(".controls"), actions = figure.querySelector(".actions");
    const again = () => { draw(figure); fill(); };
    if (views.length > 1) {
      controls.append(control("against", views, (value) => { chosen.get(key).view = value; again(); }));
    }
    for (const name of chart.filters) {
      controls.append(control(name, distinct(chart, name), (value) => { filters[name] = value; again(); }));
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Download CSV";
    button.setAttribute("aria-label", `Download the data of ${chart.title} as CSV`);
    button.addEventListener("click", () => download(`${key}.csv`, csv(charts[key])));
    const details = document.createElement("details"), summary = document.createElement("summary");
    summary.textContent = "Show as a table";
    details.append(summary);
    const fill = () => {
      details.querySelector("div")?.remove();
      if (details.open) details.append(table(chart.title, charts[key].columns, shownRows(key)));
    };
    details.addEventListener("toggle", fill);
    actions.append(button, details);
  }

  // A name breaks behind a colon or an equals sign, or else between its words; page.py does the same.
  function breakable(value) {
    const text = String(value), name = text.replace(/([:=])(?=\S)/g, "$1\u0000");
    const parts = (name === text ? text.replace(/([A-Za-z][_.])(?=[A-Za-z])/g, "$1\u0000") : name).split("\u0000");
    return parts.flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part]));
  }

  function table(caption, columns, rows) {
    const outer = document.createElement("div"), inner = document.createElement("table");
    outer.className = "scroll";
    outer.tabIndex = 0;
    outer.setAttribute("role", "region");
    outer.setAttribute("aria-label", caption);
    const more = rows.length > MOST_ROWS ? `, the first ${MOST_ROWS} of ${rows.length} rows` : "";
    inner.createCaption().textContent = caption + more;
    const head = inner.createTHead().insertRow();
    for (const name of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      head.append(cell);
    }
    const body = inner.createTBody();
    for (const row of rows.slice(0, MOST_ROWS)) {
      const line = body.insertRow();
      for (const name of columns) line.insertCell().textContent = row[name] ?? "";
      line.cells[0]?.replaceChildren(...breakable(line.cells[0].textContent));
    }
    outer.append(inner);
    hint(outer);
    return outer;
  }

  // The same place on the page with new rows; whoever has scrolled stays there.
  function renew(old, caption, columns, rows) {
    const fresh = table(caption, columns, rows);
    old.setAttribute("aria-label", caption);
    old.replaceChildren(...fresh.childNodes);
    look(old);
  }

  // A table that goes on beyond its edge says so until one has scrolled to its end.
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => look(target)));
  function look(outer) {
    outer.classList.toggle("wide", outer.scrollWidth > outer.clientWidth + 1);
    outer.classList.toggle("end", outer.scrollLeft + outer.clientWidth >= outer.scrollWidth - 1);
  }
  function hint(outer) {
    outer.addEventListener("scroll", () => look(outer), { passive: true });
    sizes.observe(outer);
  }

  function csv(chart) {
    const quoted = (value) => {
      let text = value === null || value === undefined ? "" : String(value);
      // no text that a spreadsheet would compute; export.py does the same
      if (typeof value === "string" && /^[=+\-@\t\r]/.test(text) && !/^[-+][-+0-9.,±%*?() eE]*$/.test(text)) text = `'${text}`;
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const lines = rowsOf(chart).map((row) => chart.columns.map((name) => quoted(row[name])).join(","));
    return [chart.columns.map(quoted).join(","), ...lines].join("\r\n") + "\r\n";
  }

  function download(name, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const figures = [...document.querySelectorAll("figure[data-chart]")];
  async function drawAll() {
    for (const figure of figures) await draw(figure);
    document.body.dataset.ready = "true";
  }

  async function follow() {
    const state = document.getElementById("state");
    let known = "";
    for (;;) {
      try {
        const answer = await fetch("data.json", { headers: { "If-None-Match": known }, cache: "no-store" });
        if (answer.status === 200) {
          const news = await answer.json();
          known = answer.headers.get("ETag") ?? "";
          state.textContent = news.state;
          const same = Object.keys(news.charts).every((key) => key in charts);
          if (!same || Object.keys(news.charts).length !== figures.length) return location.reload();
          const old = [...document.querySelectorAll('[data-of="devices"]')];
          if (old.length !== news.devices.length) return location.reload();
          news.devices.forEach((each, place) => renew(old[place], ...each));
          charts = news.charts;
          methods = everyMethod();
          await drawAll();
        }
      } catch (error) {
        state.textContent = `no connection to fedtailor watch (${error.message})`;
      }
      await new Promise((done) => setTimeout(done, 2000));
    }
  }

  document.querySelectorAll(".scroll").forEach(hint);
  figures.forEach(equip);
  drawAll().then(() => { if (document.body.dataset.live) follow(); });
  dark.addEventListener("change", drawAll);
})();
