//! Plots of what the tables say: `benches/plots/*.svg`.

use std::error::Error;

use plotters::prelude::*;

use crate::data::{Row, folder, read};

/// A named line: points of x and y.
type Line = (String, Vec<(f64, f64)>);

const SIZE: (u32, u32) = (900, 480);
/// Told apart by people who do not see all colours (after Okabe and Ito), and by their order in the legend.
const COLOURS: [RGBColor; 11] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
    RGBColor(0, 0, 0),
    RGBColor(140, 86, 75),
    RGBColor(188, 189, 34),
    RGBColor(80, 60, 160),
];

pub(crate) fn draw() {
    if let Err(error) = draw_all() {
        panic!("cannot draw: {error}");
    }
}

fn draw_all() -> Result<(), Box<dyn Error>> {
    let contention = read("contention");
    let first: Vec<&Row> = contention.iter().filter(|row| row.text("round") == "1").collect();
    let of_1_ms = |row: &&&Row| row.text("hold_ms") == "1" && row.text("pause_ms") == "0";
    let of_1_ms: Vec<&Row> = first.iter().filter(of_1_ms).copied().collect();
    let by = |column: &'static str, times: f64| {
        lines(&of_1_ms, "peer", move |row| (row.number("contenders"), row.number(column) * times))
    };
    log_log("max-wait", "Longest wait, held for 1 ms each time", "contenders", "ms", &by("max_ms", 1.0))?;
    log_log(
        "jain",
        "Evenness (Jain's index; 1 = all had the lock as often), held for 1 ms",
        "contenders",
        "index",
        &by("jain", 1.0),
    )?;
    log_log(
        "held",
        "Share of the time in which the lock is held, 1 ms each time",
        "contenders",
        "%",
        &by("held", 100.0),
    )?;

    let load = read("load");
    let load: Vec<&Row> = load.iter().collect();
    let mut waits = Vec::new();
    for (column, name) in [("p50_ms", "p50"), ("p99_ms", "p99"), ("p999_ms", "p99.9")] {
        let of_column = lines(&load, "scheme", move |row| (row.number("offered") / 1e3, row.number(column)));
        waits.extend(of_column.into_iter().map(|(scheme, points)| (format!("{scheme}, {name}"), points)));
    }
    log_log("load", "Offered load: time of an operation", "thousand operations per second", "ms", &waits)?;

    let handoff = read("handoff");
    let handoff: Vec<&Row> = handoff.iter().filter(|row| row.text("scheme") != "PING").collect();
    let by = |column| lines(&handoff, "scheme", move |row| (row.number("waiters"), row.number(column)));
    let (time, cost) = (by("median_pings"), by("cpu_us"));
    log_log(
        "handoff-time",
        "Handoff: from the release until the next holder knows",
        "waiters",
        "round trips of PING",
        &time,
    )?;
    log_log("handoff-cost", "Handoff: processor time of the server", "waiters", "us", &cost)?;

    let cost = read("cost");
    let cost: Vec<&Row> =
        cost.iter().filter(|row| row.text("pipeline") == "64" && row.text("server").starts_with("no file")).collect();
    bars("cost", "Server time per lock taken and given back, pipeline 64 (us)", &cost)
}

/// The rows with the same name, as a line each.
fn lines(rows: &[&Row], name: &str, point: impl Fn(&Row) -> (f64, f64)) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let name = row.text(name);
        if !lines.iter().any(|(line, _)| line == name) {
            lines.push((name.to_owned(), Vec::new()));
        }
        let line = lines.iter_mut().find(|(line, _)| line == name);
        line.into_iter().for_each(|(_, points)| points.push(point(row)));
    }
    lines.sort_by(|a, b| a.0.cmp(&b.0));
    lines
}

fn log_log(file: &str, title: &str, x: &str, y: &str, lines: &[Line]) -> Result<(), Box<dyn Error>> {
    let (xs, ys): (Vec<f64>, Vec<f64>) = lines.iter().flat_map(|(_, points)| points).copied().unzip();
    let range = |values: &[f64], room: f64| {
        let (low, high) =
            values.iter().fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(*value), high.max(*value)));
        low / room..high * room
    };
    let path = folder("plots").join(file).with_extension("svg");
    let root = SVGBackend::new(&path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(SIZE.0 - 190);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(range(&xs, 1.1).log_scale(), range(&ys, 1.2).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .light_line_style(WHITE)
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .draw()?;
    for (at, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        key(&legend, at, name, colour)?;
    }
    root.present()?;
    Ok(())
}

fn short(value: &f64) -> String {
    if *value >= 1.0 { format!("{value:.0}") } else { format!("{value}") }
}

fn key<D: DrawingBackend>(
    legend: &DrawingArea<D, plotters::coord::Shift>,
    at: usize,
    name: &str,
    colour: RGBColor,
) -> Result<(), Box<dyn Error>>
where
    D::ErrorType: 'static,
{
    let y = 60 + 24 * i32::try_from(at)?;
    legend.draw(&Rectangle::new([(4, y - 2), (24, y + 2)], colour.filled()))?;
    legend.draw(&Text::new(name.to_owned(), (30, y - 7), ("sans-serif", 14)))?;
    Ok(())
}

fn bars(file: &str, title: &str, rows: &[&Row]) -> Result<(), Box<dyn Error>> {
    let path = folder("plots").join(file).with_extension("svg");
    let root = SVGBackend::new(&path, (SIZE.0, 60 + 40 * u32::try_from(rows.len())?)).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new(title.to_owned(), (20, 14), ("sans-serif", 18)))?;
    let most = rows.iter().map(|row| row.number("us")).fold(0.0, f64::max);
    for (at, row) in rows.iter().enumerate() {
        let (us, y) = (row.number("us"), 50 + 40 * i32::try_from(at)?);
        #[expect(clippy::cast_possible_truncation, reason = "a width in pixels")]
        let right = 150 + (us / most * 620.0) as i32;
        root.draw(&Rectangle::new(
            [(150, y), (right, y + 24)],
            COLOURS[usize::from(row.text("scheme") != "FLOCK")].filled(),
        ))?;
        root.draw(&Text::new(row.text("scheme").to_owned(), (20, y + 5), ("sans-serif", 15)))?;
        root.draw(&Text::new(format!("{us:.2}"), (right + 8, y + 5), ("sans-serif", 15)))?;
    }
    root.present()?;
    Ok(())
}
