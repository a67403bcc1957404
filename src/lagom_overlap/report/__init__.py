"""Results for people: HTML pages, terminal tables, figures. A folder per verb; `render` makes the pages."""
