"use strict";
(function () {
  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }
  // The figures carry no colour for text, axes and grids: the page knows whether it is light, dark or on paper.
  function theme(layout) {
    var ink = colour("--ink"), muted = colour("--muted"), grid = colour("--grid"), rule = colour("--rule");
    var patch = {
      "font.color": ink,
      "hoverlabel.bgcolor": colour("--raised"),
      "hoverlabel.bordercolor": rule,
      "hoverlabel.font.color": ink
    };
    Object.keys(layout).forEach(function (key) {
      if (/^[xy]axis[0-9]*$/.test(key)) {
        patch[key + ".gridcolor"] = grid;
        patch[key + ".linecolor"] = rule;
        patch[key + ".tickcolor"] = rule;
        patch[key + ".tickfont.color"] = muted;
        patch[key + ".title.font.color"] = muted;
      }
    });
    return patch;
  }
  var drawn = [];
  function draw(node) {
    if (node.dataset.drawn || !node.getClientRects().length) { return; }
    node.dataset.drawn = "yes";
    var figure = JSON.parse(document.getElementById(node.dataset.figure).textContent);
    // A narrow page stacks the legend: the figure grows by its rows, so that they do not lie on the plot.
    if (node.clientWidth < 640 && figure.layout.legend && figure.layout.showlegend !== false) {
      var entries = figure.data.filter(function (trace) { return trace.name && trace.showlegend !== false; }).length;
      if (entries > 4) {
        figure.layout.height += 18 * entries;
        figure.layout.legend.maxheight = 0.9;
      }
    }
    var config = { responsive: true, displaylogo: false, displayModeBar: false, typesetMath: false };
    Plotly.newPlot(node, figure.data, figure.layout, config).then(function () {
      drawn.push(node);
      return Plotly.relayout(node, theme(figure.layout));
    });
  }
  function drawAll() { document.querySelectorAll(".plot").forEach(draw); }
  function retheme() { drawn.forEach(function (node) { Plotly.relayout(node, theme(node.layout)); }); }
  document.querySelectorAll("details").forEach(function (node) { node.addEventListener("toggle", drawAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
  matchMedia("print").addEventListener("change", retheme);
  drawAll();
})();
