//! Tables without lines: columns for the eye, and for `awk`.

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table, presets};

use crate::output;

#[derive(Debug)]
pub(crate) struct Columns {
    table: Table,
}

impl Columns {
    /// Numbers stand on the right, under names that end in `>`.
    pub(crate) fn new(names: &[&str]) -> Self {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        if output::colours() {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        let name = |name: &&str| Cell::new(name.trim_end_matches('>')).add_attribute(Attribute::Bold);
        table.set_header(names.iter().map(name));
        for (index, name) in names.iter().enumerate() {
            let Some(column) = table.column_mut(index) else { continue };
            column.set_padding((0, 2));
            if name.ends_with('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        Self { table }
    }

    pub(crate) fn add(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.table.add_row(cells.into_iter().collect::<Vec<_>>());
    }

    /// The lines, each with its end.
    pub(crate) fn text(&self) -> String {
        self.table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

pub(crate) fn cell(text: impl ToString) -> Cell {
    Cell::new(text)
}

/// Somebody should look at this.
pub(crate) fn notable(text: impl ToString, notable: bool) -> Cell {
    if notable { Cell::new(text).fg(Color::Yellow) } else { Cell::new(text) }
}
