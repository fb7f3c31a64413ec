"use strict";
(() => {
  const number = text => {
    const found = /^[^\d]*?([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)/.exec(text.replace(/\u2212/g, "-"));
    return found ? Number(found[1]) : NaN;
  };
  const words = cell => cell.textContent.replace(/\s+/g, " ").trim();
  const spoken = cell => {  // without signs, which stand before names and have no place in the alphabet
    if (!cell.querySelector("[aria-hidden=true]")) return words(cell);
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("[aria-hidden=true]").forEach(sign => sign.remove());
    return words(copy);
  };

  const sorted = (rows, column, numeric, descending) => {
    const key = row => numeric ? number(spoken(row.cells[column])) : spoken(row.cells[column]);
    const unknown = value => value === "" || Number.isNaN(value) || value === "\u2013";
    return rows.map(row => [key(row), row]).sort(([a], [b]) => {
      if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);  // at the end, whatever the order
      const order = numeric ? a - b : a.localeCompare(b, "en", {numeric: true});
      return descending ? -order : order;
    }).map(([, row]) => row);
  };

  const makeSortable = table => {
    const bodies = [...table.tBodies].map(body => ({body, rows: [...body.rows].filter(row => !row.matches(".group"))}));
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const numeric = head.dataset.sort === "number";
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");  // not every browser reflects ariaSort
      button.addEventListener("click", () => {
        // High numbers and the beginning of the alphabet first, then the reverse, then as it was.
        const ways = numeric ? ["none", "descending", "ascending"] : ["none", "ascending", "descending"];
        const way = ways[(ways.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
        heads.forEach(other => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", way);
        for (const {body, rows} of bodies)
          body.append(...(way === "none" ? rows : sorted(rows, column, numeric, way === "descending")));
      });
    });
  };

  const makeFilter = (table, number) => {
    const rows = [...table.tBodies].flatMap(body => [...body.rows]).filter(row => !row.matches(".group"));
    if (rows.length < 8) return;
    // A row is also found by the words of the group it stands in.
    const about = row => row.parentNode.querySelector(".group")?.textContent ?? "";
    const texts = new Map(rows.map(row => [row, [...row.cells].map(words).concat(about(row)).join(" ").toLowerCase()]));
    const line = document.createElement("p");
    line.className = "filter";
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "search";
    box.id = `filter-${number}`;
    box.placeholder = 'words, or "a phrase"';
    label.htmlFor = box.id;
    label.textContent = "Show rows with";
    const told = document.createElement("output");
    told.htmlFor = box.id;
    line.append(label, box, told);
    table.closest(".scroll").before(line);
    const apply = () => {
      const wanted = [...box.value.toLowerCase().matchAll(/"([^"]+)"?|[^\s"]+/g)].map(found => found[1] ?? found[0]);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !wanted.every(word => texts.get(row).includes(word));
        shown += !row.hidden;
      }
      for (const body of table.tBodies) {
        const group = body.querySelector(".group");
        if (group) group.hidden = [...body.rows].every(row => row === group || row.hidden);
      }
      told.textContent = wanted.length ? `${shown} of ${rows.length}` : "";
    };
    box.addEventListener("input", apply);
  };

  document.querySelectorAll("table.sortable").forEach((table, place) => {
    makeSortable(table);
    if (table.dataset.filter !== undefined) makeFilter(table, place);
  });
})();
