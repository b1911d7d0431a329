"""The page's own script: draws the figures in the colours of the scheme in force, and copies code."""

SCRIPT = r"""
(function () {
  "use strict";
  var root = document.documentElement;
  var plots = Array.prototype.slice.call(document.querySelectorAll(".plot"));
  function coloured(value, key, sheet) {
    if (typeof value === "string") {
      var found = /color$/i.test(key) && /^var\((--[a-z0-9-]+)\)$/.exec(value);
      return found ? sheet.getPropertyValue(found[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map(function (item) { return coloured(item, key, sheet); });
    if (value && typeof value === "object") {
      var copy = {};
      Object.keys(value).forEach(function (name) { copy[name] = coloured(value[name], name, sheet); });
      return copy;
    }
    return value;
  }
  var figures = plots.map(function (plot) { return JSON.parse(plot.parentNode.querySelector("script.figure").textContent); });
  function draw() {
    if (!window.Plotly) return;
    var sheet = getComputedStyle(root);
    plots.forEach(function (plot, place) {
      var figure = coloured(figures[place], "", sheet);
      if (plot.clientWidth < 480) figure.layout.font.size = 12;
      var note = plot.querySelector(".nojs");
      if (note) note.remove();
      window.Plotly.react(plot, figure.data, figure.layout, { responsive: true, displayModeBar: false, scrollZoom: false });
    });
  }
  draw();
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  if (dark.addEventListener) dark.addEventListener("change", draw);
  window.addEventListener("beforeprint", function () { root.dataset.scheme = "light"; draw(); });
  window.addEventListener("afterprint", function () { delete root.dataset.scheme; draw(); });
  function select(pre) {
    var range = document.createRange();
    range.selectNodeContents(pre);
    var chosen = window.getSelection();
    chosen.removeAllRanges();
    chosen.addRange(range);
  }
  document.querySelectorAll(".code button").forEach(function (button) {
    button.hidden = false;
    var pre = button.closest(".code").querySelector("pre"), word = button.textContent;
    function said(text) {
      button.textContent = text;
      setTimeout(function () { button.textContent = word; }, 1600);
    }
    function byHand() {
      select(pre);
      said(document.execCommand && document.execCommand("copy") ? "Copied" : "Selected");
    }
    button.addEventListener("click", function () {
      if (!navigator.clipboard) return byHand();
      navigator.clipboard.writeText(pre.textContent).then(function () { said("Copied"); }, byHand);
    });
  });
})();
"""
"""Runs at the end of the page; does nothing but what stands here, and asks no one for anything."""
