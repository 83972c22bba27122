for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const text = row => row.cells[head.cellIndex].textContent;
  const order = (a, b) => {
    const x = parseFloat(a), y = parseFloat(b);
    if (isNaN(x) || isNaN(y)) return isNaN(x) && isNaN(y) ? a.localeCompare(b) : isNaN(x) ? 1 : -1;
    return x - y;
  };
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(text(a), text(b))));
});
