(function () {
  "use strict";
  const root = document.documentElement;
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const drawn = new Set(), hidden = new Set();
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const painted = new Set(["color", "fillcolor", "gridcolor", "linecolor", "tickcolor", "zerolinecolor", "bgcolor", "bordercolor"]);

  /* Colours: specs name roles, the style sheet says what they are. */
  function property(name) { return getComputedStyle(root).getPropertyValue("--" + name).trim(); }
  function stops(name) { return property(name).split(",").map(function (s) { return s.trim(); }); }
  function channels(hex) {
    const full = hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex;
    return [1, 3, 5].map(function (i) { return parseInt(full.slice(i, i + 2), 16); });
  }
  function between(list, t) {
    const at = Math.min(Math.max(t, 0), 1) * (list.length - 1), left = Math.min(Math.floor(at), list.length - 2);
    const a = channels(list[left]), b = channels(list[left + 1]);
    return "rgb(" + a.map(function (v, i) { return Math.round(v + (b[i] - v) * (at - left)); }).join(",") + ")";
  }
  function colour(token) {
    if (typeof token !== "string" || token[0] !== "@") return token;
    const parts = token.slice(1).split("/");
    if (token.startsWith("@seq:")) {
      const solid = between(stops("seq"), parseFloat(parts[0].slice(4)));
      return parts.length > 1 ? solid.replace("rgb(", "rgba(").replace(")", "," + parts[1] + ")") : solid;
    }
    const hex = property(parts[0]);
    return parts.length > 1 ? "rgba(" + channels(hex).join(",") + "," + parts[1] + ")" : hex;
  }
  function paint(value, key) {
    if (key === "colorscale" && value === "@heat") {
      const list = stops("heat");
      return list.map(function (c, i) { return [i / (list.length - 1), c]; });
    }
    if (painted.has(key)) return Array.isArray(value) ? value.map(colour) : colour(value);
    if (Array.isArray(value)) return value.length && typeof value[0] === "object" ? value.map(function (v) { return paint(v); }) : value;
    if (value && typeof value === "object") {
      const copy = {};
      for (const name of Object.keys(value)) copy[name] = paint(value[name], name);
      return copy;
    }
    return value;
  }

  /* A figure may have several views, or be made from numbers; the selections above it say what is shown. */
  const chosen = {}, makers = {};
  function view(spec) {
    if (spec.make) return makers[spec.make](spec);
    if (!spec.views) return spec;
    const picks = chosen[spec.switch] || [], parts = spec.parts || picks.map(function (_, i) { return i; });
    const found = spec.views[parts.map(function (i) { return picks[i]; }).join("|")];
    const layout = Object.assign({}, spec.layout);
    if (found) ["x", "y"].forEach(function (c) { layout[c + "axis"] = Object.assign({}, layout[c + "axis"], found[c]); });
    else layout.annotations = [{ text: "not measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
    const data = (found ? found.data : []).map(function (trace) { /* what traces have in common is kept once */
      const whole = Object.assign({}, spec.styles[trace.style], trace);
      delete whole.style;
      ["x", "customdata"].forEach(function (k) { if (typeof whole[k] === "number") whole[k] = spec.shared[whole[k]]; });
      return whole;
    });
    return { data: data, layout: layout };
  }

  function draw(id, width) {
    const node = document.getElementById(id);
    if (!node || typeof Plotly === "undefined" || node.closest("[hidden]")) return;
    const spec = view(specs[id]), layout = paint(spec.layout);
    const data = spec.data.map(function (trace) {
      const copy = paint(trace);
      copy.visible = !(trace.meta && hidden.has(trace.meta.line));
      return copy;
    });
    layout.hoverlabel = Object.assign({}, layout.hoverlabel, {
      bgcolor: property("raised"), bordercolor: property("rule"), font: { size: 12, color: property("ink") }
    });
    layout.font.color = property("soft");
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: property("soft"), activecolor: property("ink") };
    layout.dragmode = coarse ? false : "zoom";
    layout.autosize = !width;
    if (width) { layout.width = width; layout.height = parseInt(node.style.height, 10) || width * 0.9; }
    Plotly.react(node, data, layout, {
      displaylogo: false, responsive: true, displayModeBar: coarse ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]
    });
    drawn.add(id);
  }
  function redraw() { drawn.forEach(function (id) { draw(id); }); }

  const observer = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (entry.isIntersecting) { observer.unobserve(entry.target); draw(entry.target.id); }
    });
  }, { rootMargin: "700px 0px" });
  document.querySelectorAll(".plot").forEach(function (node) { observer.observe(node); });

  document.querySelectorAll("[data-switch]").forEach(function (box) {
    const name = box.dataset.switch, selects = Array.from(box.querySelectorAll("select, input[type=range]"));
    const says = document.querySelector('[data-says="' + name + '"]');
    function read() {
      chosen[name] = selects.map(function (s) { return s.value; });
      if (says) says.textContent = selects.map(function (s) { return s.selectedOptions ? s.selectedOptions[0].dataset.words || "" : ""; }).join(" ");
    }
    read();
    box.hidden = selects.every(function (s) { return s.options && s.options.length < 2; });
    selects.forEach(function (select, i) {
      select.addEventListener(select.options ? "change" : "input", function () {
        read();
        drawn.forEach(function (id) {
          const spec = specs[id]; /* `reads` says which selections a figure depends on: name, or name and place */
          if (spec.reads ? spec.reads.includes(name) || spec.reads.includes(name + i) : spec.switch === name) draw(id);
        });
      });
    });
  });

  window.anisoscope = { makers: makers, chosen: chosen, specs: specs, drawn: drawn, colour: colour };

  /* Theme */
  function theme() { return root.dataset.theme || (dark.matches ? "dark" : "light"); }
  document.getElementById("theme").addEventListener("click", function () {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("anisoscope-theme", root.dataset.theme); } catch (e) { /* a file may have no storage */ }
    redraw();
  });
  dark.addEventListener("change", redraw);

  /* Models on and off, in all charts at once; a figure of one model goes with it */
  function show(line, on) {
    if (on) hidden.delete(line); else hidden.add(line);
    document.querySelectorAll('main [data-line="' + line + '"]:not(button)').forEach(function (node) { node.hidden = !on; });
  }
  document.querySelectorAll(".key button").forEach(function (button) {
    if (button.getAttribute("aria-pressed") === "false") show(Number(button.dataset.line), false);
    button.addEventListener("click", function () {
      const line = Number(button.dataset.line), off = !hidden.has(line);
      show(line, !off);
      document.querySelectorAll('.key button[data-line="' + line + '"]').forEach(function (twin) {
        twin.setAttribute("aria-pressed", String(!off));
      });
      redraw();
    });
  });

  /* Print: everything drawn, on white */
  let before = null;
  window.addEventListener("beforeprint", function () {
    before = root.dataset.theme || "";
    root.dataset.theme = "light";
    document.querySelectorAll("details").forEach(function (d) { d.open = true; });
    Object.keys(specs).forEach(function (id) { /* half a sheet of paper, or most of it; the page's own width is no guide */
      const node = document.getElementById(id);
      draw(id, node && node.closest(".single") ? 460 : 330);
    });
  });
  window.addEventListener("afterprint", function () {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    redraw();
  });

  /* The table is read back from the download itself, so the two cannot differ. */
  const link = document.getElementById("csv");
  const text = decodeURIComponent(link.getAttribute("href").slice(link.getAttribute("href").indexOf(",") + 1));
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  function parse(source) {
    const rows = [];
    let row = [], cell = "", quoted = false;
    for (let i = 0; i < source.length; i++) {
      const c = source[i];
      if (quoted) {
        if (c !== '"') cell += c;
        else if (source[i + 1] === '"') { cell += c; i++; }
        else quoted = false;
      } else if (c === '"') quoted = true;
      else if (c === ",") { row.push(cell); cell = ""; }
      else if (c === "\n") { row.push(cell); rows.push(row); row = []; cell = ""; }
      else cell += c;
    }
    return rows;
  }
  const rows = parse(text), names = rows.shift();
  const numeric = new Set(["step", "layer", "value", "low", "high", "sd", "n", "contexts", "dropped", "seed"]);
  const always = new Set(["layer", "kind", "metric", "value", "low", "high"]);
  const shown = names.map(function (_, i) { return i; }).filter(function (i) {
    const seen = new Set(rows.map(function (r) { return r[i]; }));
    return always.has(names[i]) || seen.size > 1;
  });
  const same = names.filter(function (name, i) { return !shown.includes(i) && rows.length && rows[0][i] !== ""; });
  document.getElementById("same").textContent = same.length ? " The same in every row: " + same.map(function (name) {
    return name + " " + readable(rows[0][names.indexOf(name)], name);
  }).join(", ") + "." : "";
  const body = document.querySelector("#rows tbody"), head = document.querySelector("#rows thead");
  const state = { by: -1, down: false, all: false };
  function column(name) { return names.indexOf(name); }
  function readable(value, name) {
    if (!numeric.has(name) || value === "") return value || (name === "value" ? "–" : "");
    const x = Number(value);
    if (Number.isInteger(x)) return x.toLocaleString("en");
    const size = Math.abs(x);
    const shown = size >= 1e7 || size < 1e-4 ? x.toExponential(3) : size >= 1e4 ? Math.round(x).toLocaleString("en") : x.toPrecision(4);
    return shown.replace(/-/g, "−");
  }
  function wanted() {
    const metric = document.getElementById("by-metric").value, model = document.getElementById("by-model").value;
    const words = document.getElementById("by-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    return rows.filter(function (r) {
      if (metric && r[column("metric")] !== metric) return false;
      if (model && r[column("model")] !== model) return false;
      const all = words.length ? r.join(" ").toLowerCase() : "";
      return words.every(function (w) { return all.includes(w); });
    });
  }
  function order(list) {
    if (state.by < 0) return list;
    const i = state.by, sign = state.down ? -1 : 1, byNumber = numeric.has(names[i]);
    return list.slice().sort(function (a, b) {
      if (a[i] === "" || b[i] === "") return (a[i] === "") - (b[i] === "");
      return sign * (byNumber ? Number(a[i]) - Number(b[i]) : a[i].localeCompare(b[i]));
    });
  }
  function fill() {
    const list = order(wanted()), most = state.all ? list.length : 40;
    body.textContent = "";
    list.slice(0, most).forEach(function (r) {
      const line = document.createElement("tr");
      shown.forEach(function (i) {
        const cell = document.createElement("td");
        cell.textContent = readable(r[i], names[i]);
        cell.className = numeric.has(names[i]) ? "num" : names[i] === "note" ? "prose" : "";
        line.appendChild(cell);
      });
      body.appendChild(line);
    });
    document.getElementById("count").textContent =
      "Showing " + Math.min(most, list.length).toLocaleString("en") + " of " + list.length.toLocaleString("en") + " rows.";
    document.getElementById("all").hidden = list.length <= most;
  }
  function headings() {
    const line = document.createElement("tr");
    shown.forEach(function (i) {
      const cell = document.createElement("th"), button = document.createElement("button");
      cell.scope = "col";
      cell.className = numeric.has(names[i]) ? "num" : "";
      button.type = "button";
      button.textContent = names[i];
      button.addEventListener("click", function () {
        state.down = state.by === i ? !state.down : false;
        state.by = i;
        head.querySelectorAll("th").forEach(function (th) { th.removeAttribute("aria-sort"); });
        cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        fill();
      });
      cell.appendChild(button);
      line.appendChild(cell);
    });
    head.appendChild(line);
  }
  function choices(id, name) {
    const select = document.getElementById(id);
    const values = Array.from(new Set(rows.map(function (r) { return r[column(name)]; }))).sort();
    values.forEach(function (v) { select.appendChild(new Option(v, v)); });
    select.addEventListener("change", fill);
    if (values.length < 2) select.parentElement.hidden = true;
  }
  headings();
  choices("by-metric", "metric");
  choices("by-model", "model");
  document.getElementById("by-text").addEventListener("input", fill);
  document.getElementById("all").addEventListener("click", function () { state.all = true; fill(); });
  document.querySelector("#table .filters").hidden = false;
  fill();
})();
