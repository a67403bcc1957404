"use strict";
// Draws the figures of our pages as SVG from plotly's own description of them (traces and layout), so that a page needs no
// library: scatter, bar and heat map, linear, logarithmic and category axes, shapes, annotations, legend, text under the pointer.
(function () {
  var holder = document.createElement("div");
  holder.innerHTML = "<svg></svg>"; // the parser knows SVG's namespace, so that no address stands in the page
  var NS = holder.firstChild.namespaceURI;
  var VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
  var DASHES = { dash: "7 4", dot: "2 3", dashdot: "7 3 2 3" };
  var COLOURS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"];
  var KINDS = { f8: Float64Array, f4: Float32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

  function element(parent, name, attributes, text) {
    var node = document.createElementNS(NS, name);
    for (var key in attributes) {
      if (attributes[key] !== undefined && attributes[key] !== null) { node.setAttribute(key, attributes[key]); }
    }
    if (text !== undefined) { node.textContent = text; }
    parent.appendChild(node);
    return node;
  }
  // Arrays of numbers may come as base64 of their bytes.
  function list(value) {
    if (value && value.bdata !== undefined) {
      var bytes = Uint8Array.from(atob(value.bdata), function (char) { return char.charCodeAt(0); });
      return Array.from(new KINDS[value.dtype](bytes.buffer));
    }
    return value === undefined || value === null ? [] : Array.isArray(value) ? value : [value];
  }
  function at(value, index, otherwise) {
    var found = Array.isArray(value) ? value[index % value.length] : value;
    return found === undefined || found === null ? otherwise : found;
  }
  // Labels hold <br>, <b>, <i> of ours and escaped text of the job; all of it ends as text, never as markup.
  function plain(text) {
    return String(text).replace(/<br\s*\/?>/g, "\n").replace(/<extra>[^]*?<\/extra>/g, "").replace(/<\/?[bi]>/g, "")
      .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }
  function number(value, digits) {
    if (typeof value !== "number") { return String(value); }
    return String(parseFloat(value.toPrecision(digits || 4)));
  }
  function write(parent, text, x, y, attributes) {
    var node = element(parent, "text", Object.assign({ x: x, y: y }, attributes));
    if (attributes && attributes.fill) { node.style.fill = attributes.fill; } // the page's style sheet beats an attribute
    var lines = plain(text).split("\n");
    lines.forEach(function (line, index) {
      element(node, "tspan", { x: x, dy: index ? "1.15em" : (-0.575 * (lines.length - 1)) + "em" }, line);
    });
    return node;
  }
  function longest(texts) {
    return Math.max.apply(null, texts.map(function (text) {
      return Math.max.apply(null, plain(text).split("\n").map(function (line) { return line.length; }));
    }).concat(0));
  }
  function mixed(share) {
    var place = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1), low = Math.min(VIRIDIS.length - 2, Math.floor(place));
    var colour = "#";
    for (var k = 1; k < 7; k += 2) {
      var a = parseInt(VIRIDIS[low].substr(k, 2), 16), b = parseInt(VIRIDIS[low + 1].substr(k, 2), 16);
      colour += ("0" + Math.round(a + (b - a) * (place - low)).toString(16)).slice(-2);
    }
    return colour;
  }
  function round(span, count) {
    var power = Math.pow(10, Math.floor(Math.log10(span / count)));
    return [1, 2, 5, 10].map(function (f) { return f * power; }).find(function (step) { return span / step <= count; });
  }

  // An axis: where values lie between 0 and 1, and its ticks.
  function axisOf(spec, values, num) {
    var axis = { spec: spec, domain: spec.domain || [0, 1] }, low, high;
    var texts = values.filter(function (value) { return typeof value === "string"; });
    if (spec.type === "category" || (texts.length && spec.type !== "linear" && spec.type !== "log")) {
      var names = Array.from(new Set((spec.categoryarray ? list(spec.categoryarray) : []).concat(values)))
        .filter(function (name) { return name !== null && name !== undefined; });
      axis.names = names;
      axis.place = function (value) {
        var place = (typeof value === "number" ? value : names.indexOf(value)) + 0.5;
        return spec.autorange === "reversed" ? 1 - place / names.length : place / names.length;
      };
      axis.step = 1 / Math.max(1, names.length);
      axis.ticks = names.map(function (name, index) { return [index, name]; });
      return axis;
    }
    var isLog = spec.type === "log", scaled = values.filter(function (v) { return typeof v === "number" && isFinite(v) && (!isLog || v > 0); });
    var to = function (value) { return isLog ? Math.log10(value) : value; };
    low = Math.min.apply(null, scaled.map(to)); high = Math.max.apply(null, scaled.map(to));
    if (!isFinite(low)) { low = 0; high = 1; }
    var pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    if (spec.range) { low = spec.range[0]; high = spec.range[1]; } else {
      low = axis.spec.isBar && low >= 0 ? 0 : low - pad; high += pad;
    }
    if (spec.autorange === "reversed") { var kept = low; low = high; high = kept; }
    axis.place = function (value) { return (to(value) - low) / (high - low); };
    axis.step = 0.8 / Math.abs(high - low || 1);
    if (spec.tickvals) {
      var names_ = list(spec.ticktext);
      axis.ticks = list(spec.tickvals).map(function (value, index) { return [value, names_[index]]; });
    } else if (isLog) {
      axis.ticks = [];
      for (var power = Math.floor(Math.min(low, high)); power <= Math.max(low, high); power++) {
        axis.ticks.push([Math.pow(10, power), number(Math.pow(10, power))]);
      }
    } else {
      var step = round(Math.abs(high - low), num), first = Math.ceil(Math.min(low, high) / step - 1e-9);
      axis.ticks = [];
      for (var k = first; k * step <= Math.max(low, high) + 1e-9 * step; k++) { axis.ticks.push([k * step, number(k * step, 6)]); }
    }
    axis.ticks = axis.ticks.filter(function (tick) { var p = axis.place(tick[0]); return p > -0.001 && p < 1.001; });
    return axis;
  }

  function symbol(parent, kind, x, y, size, attributes, angle) {
    var r = size / 2, open = /-open$/.test(kind), name = String(kind || "circle").replace("-open", "");
    var shapes = {
      diamond: [0, -r, r, 0, 0, r, -r, 0], square: [-r, -r, r, -r, r, r, -r, r],
      "triangle-up": [0, -r, r, r, -r, r], "triangle-down": [0, r, r, -r, -r, -r], arrow: [0, -r, 0.7 * r, r, -0.7 * r, r]
    };
    if (open) { attributes = Object.assign({}, attributes, { fill: "none", stroke: attributes.fill, "stroke-width": 2 }); }
    if (name === "star") {
      shapes.star = [];
      for (var k = 0; k < 10; k++) {
        var reach = k % 2 ? 0.45 * r : r;
        shapes.star.push(reach * Math.sin(k * Math.PI / 5), -reach * Math.cos(k * Math.PI / 5));
      }
    }
    if (name === "x" || name === "cross" || name === "line-ns") {
      var d = name === "x" ? "M-1-1 1 1M-1 1 1-1" : name === "cross" ? "M-1 0H1M0-1V1" : "M0-1V1";
      var width = attributes["stroke-width"] || 2;
      return element(parent, "path", { d: d, transform: "translate(" + x + " " + y + ") scale(" + r + ")", fill: "none",
        stroke: attributes.stroke && attributes.stroke !== "none" ? attributes.stroke : attributes.fill, "stroke-width": width, "vector-effect": "non-scaling-stroke" });
    }
    if (shapes[name]) {
      return element(parent, "polygon", Object.assign({ points: shapes[name].join(" "), transform: "translate(" + x + " " + y + ") rotate(" + (angle || 0) + ")" }, attributes));
    }
    return element(parent, "circle", Object.assign({ cx: x, cy: y, r: r }, attributes));
  }

  function hoverOf(trace, index, y, x, base) {
    if (trace.hoverinfo === "skip") { return ""; }
    var text = at(trace.hovertext, index, "");
    if (text || !trace.hovertemplate) { return plain(text || (trace.name ? trace.name + ": " : "") + number(x) + ", " + number(y)); }
    return plain(trace.hovertemplate.replace(/%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}/g, function (all, key, place, format) {
      var value = key === "x" ? x : key === "y" ? y : key === "base" ? base : key === "customdata" ? list(trace.customdata)[index] : at(trace[key], index, "");
      if (place !== undefined && Array.isArray(value)) { value = value[Number(place)]; }
      var decimals = /^\.(\d+)f$/.exec(format || "");
      return decimals && typeof value === "number" ? value.toFixed(Number(decimals[1])) : number(value);
    }));
  }

  var tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true;
  document.body.appendChild(tip);
  function hover(svg) {
    function show(event) {
      var text = event.target.getAttribute && event.target.getAttribute("data-hover");
      tip.hidden = !text;
      if (!text) { return; }
      tip.textContent = text;
      var left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8);
      tip.style.left = Math.max(4, left) + "px";
      tip.style.top = Math.max(4, event.clientY + 14 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 14) + "px";
    }
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerleave", function () { tip.hidden = true; });
  }

  function draw(node) {
    if (!node.getClientRects().length || node.dataset.width === String(node.clientWidth)) { return; }
    node.dataset.width = node.clientWidth;
    node.textContent = "";
    var figure = JSON.parse(document.getElementById(node.dataset.figure).textContent), layout = figure.layout;
    figure.data.forEach(function (trace, index) {
      ["x", "y", "base", "z", "text", "hovertext"].forEach(function (key) {
        if (trace[key] !== undefined && (typeof trace[key] === "object")) { trace[key] = list(trace[key]); }
      });
      trace.ink = (trace.marker && trace.marker.color) || (trace.line && trace.line.color) || COLOURS[index % COLOURS.length];
    });
    legend(node, figure);
    var names = { x: {}, y: {} };
    figure.data.forEach(function (trace) {
      ["x", "y"].forEach(function (side) {
        var id = trace[side + "axis"] || side;
        var known = names[side][id] = names[side][id] || [];
        var isLong = trace.type === "bar" && (trace.orientation === "h") === (side === "x");
        list(trace[side]).forEach(function (value, index) {
          if (value === null) { return; }
          known.push(isLong ? value + (at(trace.base, index, 0)) : value);
          if (isLong) { known.push(at(trace.base, index, 0)); }
        });
        var error = trace["error_" + side];
        if (error) {
          list(error.array).forEach(function (e, i) { known.push(list(trace[side])[i] + e); });
          list(error.arrayminus).forEach(function (e, i) { known.push(list(trace[side])[i] - e); });
        }
      });
    });
    (layout.shapes || []).forEach(function (shape) {
      ["x", "y"].forEach(function (side) {
        var known = names[side][shape[side + "ref"]];
        if (known && typeof shape[side + "0"] === "number") { known.push(shape[side + "0"], shape[side + "1"]); }
      });
    });
    stack(figure, names);
    var width = node.clientWidth, height = layout.height, margin = layout.margin || {}, axes = { x: {}, y: {} };
    ["x", "y"].forEach(function (side) {
      for (var id in names[side]) {
        var spec = layout[side + "axis" + id.slice(1)] || {}, partner = spec.matches && names[side][spec.matches], shown = names[side][id];
        if (spec.matches) { // axes that match show all of what any of them holds
          shown = [].concat.apply([], Object.keys(names[side]).filter(function (other) {
            var its = layout[side + "axis" + other.slice(1)] || {};
            return other === spec.matches || its.matches === spec.matches;
          }).map(function (other) { return names[side][other]; }));
          spec = Object.assign({}, partner ? layout[side + "axis" + spec.matches.slice(1)] : {}, spec);
        }
        spec.isBar = figure.data.some(function (trace) { return trace.type === "bar" && (trace[side + "axis"] || side) === id && (trace.orientation === "h") === (side === "x"); });
        axes[side][id] = axisOf(spec, shown, side === "x" ? Math.max(3, width / 130) : 5);
      }
    });
    var first = Object.keys(axes.y).map(function (id) { return axes.y[id]; });
    var widest = longest([].concat.apply([], first.map(function (axis) { return axis.spec.showticklabels === false ? [] : axis.ticks.map(function (tick) { return tick[1]; }); })));
    var hasTitle = first.some(function (axis) { return axis.spec.title && axis.spec.title.text; });
    var left = Math.min(0.42 * width, 14 + 6.6 * widest + (hasTitle ? 22 : 0)), scale = layout.coloraxis;
    var right = (scale && scale.colorbar ? 74 : 16), top = Math.min(40, margin.t || 30), bottom = 46;
    if ((layout.annotations || []).length === 0 && !names.isTall) { top = 14; }
    var svg = element(node, "svg", { width: width, height: height, viewBox: "0 0 " + width + " " + height });
    function across(axis, value) { return left + (width - left - right) * (axis.domain[0] + (axis.domain[1] - axis.domain[0]) * axis.place(value)); }
    function down(axis, value) { return height - bottom - (height - top - bottom) * (axis.domain[0] + (axis.domain[1] - axis.domain[0]) * axis.place(value)); }
    function end(axis, side, share) {
      var place = axis.domain[0] + (axis.domain[1] - axis.domain[0]) * share;
      return side === "x" ? left + (width - left - right) * place : height - bottom - (height - top - bottom) * place;
    }
    var pairs = {};
    figure.data.forEach(function (trace) { pairs[(trace.xaxis || "x") + " " + (trace.yaxis || "y")] = [trace.xaxis || "x", trace.yaxis || "y"]; });
    var clips = {}, serial = 0;
    for (var key in pairs) { frame(pairs[key]); }
    function frame(pair) {
      var x = axes.x[pair[0]], y = axes.y[pair[1]];
      var x0 = end(x, "x", 0), x1 = end(x, "x", 1), y0 = end(y, "y", 0), y1 = end(y, "y", 1);
      var id = node.dataset.figure + "-clip-" + (serial++);
      element(element(svg, "clipPath", { id: id }), "rect", { x: x0 - 1, y: y1 - 1, width: x1 - x0 + 2, height: y0 - y1 + 2 });
      clips[pair.join(" ")] = id;
      if (x.spec.showgrid !== false) {
        x.ticks.forEach(function (tick) { var at_ = across(x, tick[0]); element(svg, "line", { x1: at_, x2: at_, y1: y0, y2: y1, "class": "grid" }); });
      }
      if (y.spec.showgrid !== false && !y.names) {
        y.ticks.forEach(function (tick) { var at_ = down(y, tick[0]); element(svg, "line", { x1: x0, x2: x1, y1: at_, y2: at_, "class": "grid" }); });
      }
      element(svg, "line", { x1: x0, x2: x1, y1: y0, y2: y0, "class": "rule" });
      if (x.spec.showticklabels !== false) {
        var last = -1e9;
        x.ticks.forEach(function (tick) {
          var at_ = across(x, tick[0]), wide = 6.4 * plain(tick[1]).length;
          element(svg, "line", { x1: at_, x2: at_, y1: y0, y2: y0 + 4, "class": "rule" });
          if (at_ - wide / 2 < last + 4) { return; }
          last = at_ + wide / 2;
          write(svg, tick[1], at_, y0 + 17, { "text-anchor": "middle", "class": "tick" });
        });
      }
      if (x.spec.title && x.spec.title.text) { write(svg, x.spec.title.text, (x0 + x1) / 2, y0 + 37, { "text-anchor": "middle", "class": "tick" }); }
      if (y.spec.showticklabels !== false) {
        y.ticks.forEach(function (tick) {
          var room = Math.floor((left - 16) / 6.2);
          var text = plain(tick[1]).split("\n").map(function (line) { return line.length > room ? line.slice(0, Math.max(1, room - 1)) + "…" : line; }).join("\n");
          var label = write(svg, text.replace(/&/g, "&amp;").replace(/</g, "&lt;"), x0 - 8, down(y, tick[0]) + 4, { "text-anchor": "end", "class": "tick" });
          element(label, "title", {}, plain(tick[1]));
        });
      }
      if (y.spec.title && y.spec.title.text) {
        var middle = (y0 + y1) / 2;
        write(svg, y.spec.title.text, 12, middle, { "text-anchor": "middle", "class": "tick", transform: "rotate(-90 12 " + middle + ")" });
      }
    }
    figure.data.forEach(function (trace) {
      var pair = [trace.xaxis || "x", trace.yaxis || "y"], x = axes.x[pair[0]], y = axes.y[pair[1]];
      var group = element(svg, "g", { "clip-path": trace.cliponaxis === false || /outside/.test(trace.textposition || "") ? null : "url(#" + clips[pair.join(" ")] + ")", opacity: trace.opacity });
      if (trace.type === "heatmap") { heat(group, trace, x, y); } else if (trace.type === "bar") { bars(group, trace, x, y); } else { points(group, trace, x, y); }
    });
    function heat(group, trace, x, y) {
      var flat = [].concat.apply([], trace.z.map(list)).filter(function (v) { return typeof v === "number"; });
      var low = scale && scale.cmin !== undefined ? scale.cmin : Math.min.apply(null, flat), high = scale && scale.cmax !== undefined ? scale.cmax : Math.max.apply(null, flat);
      function edges(values, place) {
        var centres = values.map(place);
        return centres.map(function (c, i) { return [i ? (c + centres[i - 1]) / 2 : c - (centres[1] - c) / 2, i + 1 < centres.length ? (c + centres[i + 1]) / 2 : c + (c - centres[i - 1]) / 2]; });
      }
      var xs = trace.x.length ? trace.x : list(trace.z[0]).map(function (_, i) { return i; }), ys = trace.y.length ? trace.y : trace.z.map(function (_, i) { return i; });
      var columns = edges(xs, function (v) { return across(x, v); }), lines = edges(ys, function (v) { return down(y, v); });
      trace.z.forEach(function (row, j) {
        list(row).forEach(function (value, i) {
          if (typeof value !== "number") { return; }
          var hover_ = hoverOf(trace, 0, ys[j], xs[i]);
          element(group, "rect", { x: Math.min(columns[i][0], columns[i][1]), y: Math.min(lines[j][0], lines[j][1]), width: Math.abs(columns[i][1] - columns[i][0]) + 0.4, height: Math.abs(lines[j][1] - lines[j][0]) + 0.4,
            fill: mixed((value - low) / (high - low || 1)), "data-hover": hover_ ? hover_ + ": " + number(value) : null });
        });
      });
    }
    function bars(group, trace, x, y) {
      var isFlat = trace.orientation === "h", long = isFlat ? trace.x : trace.y, wide = isFlat ? trace.y : trace.x;
      var cross = isFlat ? y : x, span = (isFlat ? height - top - bottom : width - left - right) * (cross.domain[1] - cross.domain[0]) * cross.step * (1 - (layout.bargap === undefined ? 0.2 : layout.bargap));
      long.forEach(function (value, index) {
        if (value === null || value === undefined) { return; }
        var base = at(trace.base, index, 0), name = wide[index], place = isFlat ? down(y, name) : across(x, name);
        var part = span * (trace.share || 1), from = place - span / 2 + part * (trace.turn || 0);
        var a = isFlat ? across(x, base) : down(y, base), b = isFlat ? across(x, base + value) : down(y, base + value);
        var length = Math.max(0.5, Math.abs(b - a)), start = Math.min(a, b);
        var box = isFlat ? { x: start, y: from, width: length, height: part } : { x: from, y: start, width: part, height: length };
        box.fill = at(trace.ink, index, COLOURS[0]); box.opacity = trace.marker && trace.marker.opacity;
        box["data-hover"] = hoverOf(trace, index, isFlat ? name : value, isFlat ? value : name, base);
        if (length > 3) { box["class"] = "bar"; }
        element(group, "rect", box);
        var text = at(trace.text, index, "");
        if (text && trace.textposition === "outside") {
          write(group, text, isFlat ? Math.max(a, b) + 5 : place, isFlat ? place + 4 : start - 5, { "class": "tick", "text-anchor": isFlat ? "start" : "middle" });
        } else if (text && trace.textposition === "inside" && length > 6.6 * plain(text).length) {
          var ink = trace.insidetextfont && at(trace.insidetextfont.color, index, "#fff");
          write(group, text, start + length / 2, place + 4, { "text-anchor": "middle", fill: ink, "pointer-events": "none", "font-size": 11 });
        }
      });
    }
    function points(group, trace, x, y) {
      var mode = trace.mode || "lines", line = trace.line || {}, marker = trace.marker || {}, xs = trace.x, ys = trace.y, before = null;
      var spots = xs.map(function (value, index) {
        var other = ys[index];
        return value === null || other === null || value === undefined || other === undefined ? null : [across(x, value), down(y, other)];
      });
      ["x", "y"].forEach(function (side) {
        var error = trace["error_" + side];
        if (!error) { return; }
        var plus = list(error.array), minus = error.arrayminus ? list(error.arrayminus) : plus;
        spots.forEach(function (spot, i) {
          if (!spot) { return; }
          var attributes = side === "x"
            ? { x1: across(x, xs[i] - minus[i]), x2: across(x, xs[i] + plus[i]), y1: spot[1], y2: spot[1] }
            : { x1: spot[0], x2: spot[0], y1: down(y, ys[i] - minus[i]), y2: down(y, ys[i] + plus[i]) };
          element(group, "line", Object.assign(attributes, { stroke: error.color || at(trace.ink, i, COLOURS[0]), "stroke-width": error.thickness || 2 }));
        });
      });
      if (/lines/.test(mode)) {
        var path = "", pen = false;
        spots.forEach(function (spot, index) {
          if (!spot) { pen = false; return; }
          path += !pen ? "M" + spot : line.shape === "hv" ? "H" + spot[0] + "V" + spot[1] : "L" + spot;
          pen = true;
        });
        element(group, "path", { d: path, fill: "none", stroke: line.color || at(trace.ink, 0), "stroke-width": line.width || 2, "stroke-dasharray": DASHES[line.dash], "data-hover": /markers/.test(mode) ? null : hoverOf(trace, 0, ys[0], xs[0]) });
      }
      if (/markers/.test(mode)) {
        spots.forEach(function (spot, index) {
          var size = at(marker.size, index, 7);
          if (!spot || !size) { before = spot; return; }
          var colour = at(marker.color, index, trace.ink);
          if (Array.isArray(colour)) { colour = colour[0]; }
          if (typeof colour === "number") { colour = mixed((colour - (scale.cmin || 0)) / ((scale.cmax - scale.cmin) || 1)); }
          if (/arrow/.test(at(marker.symbol, index, "")) && !marker.color) { colour = line.color; }
          var kind = at(marker.symbol, index, "circle"), angle = 0;
          if (kind === "arrow" && before) { angle = Math.atan2(spot[1] - before[1], spot[0] - before[0]) * 180 / Math.PI + 90; }
          symbol(group, kind, spot[0], spot[1], size, { fill: colour, opacity: marker.opacity, stroke: marker.line && marker.line.color ? marker.line.color : "none",
            "stroke-width": marker.line && marker.line.width, "data-hover": hoverOf(trace, index, ys[index], xs[index]) }, angle);
          before = spot;
        });
      }
      if (/text/.test(mode)) {
        spots.forEach(function (spot, index) {
          if (spot) { write(group, at(trace.text, index, ""), spot[0] + 4, spot[1] - 4, { "class": "tick", "font-size": 10 }); }
        });
      }
    }
    function locate(ref, side, value) {
      if (ref === "paper" || ref === undefined) { return side === "x" ? left + (width - left - right) * value : height - bottom - (height - top - bottom) * value; }
      var parts = ref.split(" "), axis = axes[side][parts[0]];
      if (!axis) { return 0; }
      return parts[1] === "domain" ? end(axis, side, value) : side === "x" ? across(axis, value) : down(axis, value);
    }
    (layout.shapes || []).forEach(function (shape) {
      var a = [locate(shape.xref, "x", shape.x0), locate(shape.yref, "y", shape.y0)], b = [locate(shape.xref, "x", shape.x1), locate(shape.yref, "y", shape.y1)], line = shape.line || {};
      if (shape.type === "rect") {
        element(svg, "rect", { x: Math.min(a[0], b[0]), y: Math.min(a[1], b[1]), width: Math.abs(a[0] - b[0]), height: Math.abs(a[1] - b[1]), fill: shape.fillcolor || "none", opacity: shape.opacity, "pointer-events": "none" });
      } else {
        element(svg, "line", { x1: a[0], y1: a[1], x2: b[0], y2: b[1], stroke: line.color || "currentColor", "stroke-width": line.width || 1, "stroke-dasharray": DASHES[line.dash], "pointer-events": "none" });
      }
    });
    (layout.annotations || []).forEach(function (note) {
      var x = locate(note.xref || "x", "x", note.x), y = locate(note.yref || "y", "y", note.y), anchor = { left: "start", right: "end" }[note.xanchor] || "middle";
      var lift = note.yanchor === "bottom" ? -5 : note.yanchor === "top" ? 13 : 4;
      write(svg, note.text, x, y + lift, { "text-anchor": anchor, fill: note.font && note.font.color, "font-size": (note.font && note.font.size) || 12, "pointer-events": "none" });
    });
    if (scale && scale.colorbar) {
      var tall = 0.7 * (height - top - bottom), from = top + 40, axis = axisOf({ type: "linear", range: [scale.cmin, scale.cmax] }, [], 5);
      for (var k = 0; k < 40; k++) { element(svg, "rect", { x: width - 64, y: from + tall * (1 - (k + 1) / 40), width: 10, height: tall / 40 + 0.5, fill: mixed((k + 0.5) / 40) }); }
      axis.ticks.forEach(function (tick) { write(svg, tick[1], width - 50, from + tall * (1 - axis.place(tick[0])) + 4, { "class": "tick" }); });
      if (scale.colorbar.title) { write(svg, scale.colorbar.title.text, width - 4, from - 20, { "class": "tick", "text-anchor": "end" }); }
    }
    hover(svg);
  }

  // Stacked bars begin where the one before ends, grouped ones share their place.
  function stack(figure, names) {
    var bars = figure.data.filter(function (trace) { return trace.type === "bar"; }), mode = figure.layout.barmode || "group", sums = {};
    bars.forEach(function (trace, index) {
      if (mode === "group" && bars.length > 1) {
        var alike = bars.filter(function (other) { return (other.xaxis || "x") === (trace.xaxis || "x") && (other.yaxis || "y") === (trace.yaxis || "y"); });
        trace.share = 1 / alike.length; trace.turn = alike.indexOf(trace);
      }
      if (mode !== "stack") { return; }
      var isFlat = trace.orientation === "h", long = isFlat ? trace.x : trace.y, wide = isFlat ? trace.y : trace.x, side = isFlat ? "x" : "y";
      trace.base = wide.map(function (name, place) {
        var base = sums[name] || 0;
        sums[name] = base + (long[place] || 0);
        names[side][trace[side + "axis"] || side].push(sums[name]);
        return base;
      });
    });
  }

  function legend(node, figure) {
    var entries = figure.layout.showlegend === false ? [] : figure.data.filter(function (trace) { return trace.name && trace.showlegend !== false; });
    if (entries.length < 2 && figure.layout.showlegend !== true && !figure.data.some(function (trace) { return trace.showlegend; })) { return; }
    var list_ = document.createElement("ul");
    list_.className = "legend";
    entries.forEach(function (trace) {
      var item = document.createElement("li"), mark = document.createElementNS(NS, "svg"), ink = at(trace.ink, 0);
      mark.setAttribute("width", 22); mark.setAttribute("height", 12);
      var line = trace.line || {}, marker = trace.marker || {};
      if (trace.type === "bar") {
        element(mark, "rect", { x: 4, y: 1, width: 12, height: 10, fill: typeof ink === "string" ? ink : COLOURS[0] });
      } else {
        if (/lines/.test(trace.mode || "lines")) { element(mark, "line", { x1: 1, x2: 21, y1: 6, y2: 6, stroke: line.color || ink, "stroke-width": line.width || 2, "stroke-dasharray": DASHES[line.dash] }); }
        if (trace.mode === "markers") { symbol(mark, at(marker.symbol, 0, "circle"), 11, 6, 10, { fill: typeof ink === "string" ? ink : COLOURS[0] }); }
      }
      item.appendChild(mark);
      item.appendChild(document.createTextNode(plain(trace.name)));
      list_.appendChild(item);
    });
    node.appendChild(list_);
  }

  function drawAll() { document.querySelectorAll(".plot").forEach(draw); }
  document.querySelectorAll("details").forEach(function (node) { node.addEventListener("toggle", drawAll); });
  window.addEventListener("resize", drawAll);
  document.querySelectorAll("[data-copy]").forEach(function (button) {
    button.addEventListener("click", function () {
      var block = button.parentNode.querySelector("code");
      navigator.clipboard.writeText(block.textContent).then(function () { button.textContent = "Copied"; });
    });
  });
  document.querySelectorAll("figure > svg, .lanes svg").forEach(hover);
  drawAll();
})();
