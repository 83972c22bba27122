for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[head.cellIndex].querySelector("data")?.value ?? row.cells[head.cellIndex].textContent;
  const order = (a, b) => {
    const x = Number(a), y = Number(b);
    if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
    return isNaN(x) || isNaN(y) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
  };
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))));
});
setUpCharts(document);
