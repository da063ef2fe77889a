//! The plots beside the report, as SVG: what happened when, how long it took, how often.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::faults::{Group, Kind};
use crate::judge::{Evidence, Told, Verdict};
use crate::report::Quantiles;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// A plot that was drawn: its file, and what it shows.
pub(crate) type Plot = (&'static str, &'static str);

const WIDTH: u32 = 900;
const FONT: &str = "sans-serif";
/// Bars of a plot over time, at most.
const BARS_MAX: u64 = 150;
/// Bars of a distribution for each doubling of the time.
const BARS_PER_DOUBLING: f64 = 4.0;
/// What took less than this is shown as this.
const MS_MIN: f64 = 0.01;
const BAR: RGBColor = RGBColor(150, 180, 200);
const MARK: RGBColor = RGBColor(213, 94, 0);
const TITLE: (&str, u32) = (FONT, 16);
const LABEL: (&str, u32) = (FONT, 13);
const TICK: (&str, u32) = (FONT, 12);

impl Group {
    /// Told apart by people who do not see all colours (after Okabe and Ito), and by their order.
    fn colour(self) -> RGBColor {
        match self {
            Group::Servers => RGBColor(213, 94, 0),
            Group::Clock => RGBColor(0, 0, 0),
            Group::Network => RGBColor(0, 114, 178),
            Group::Proxies => RGBColor(86, 180, 233),
            Group::Moments => RGBColor(230, 159, 0),
            Group::Connections => RGBColor(204, 121, 167),
            Group::Locks => RGBColor(0, 158, 115),
        }
    }
}

/// Draws what there is something to show of, in this order.
///
/// # Panics
/// If it cannot be written.
pub(crate) fn draw(folder: &Path, evidence: &Evidence, verdict: &Verdict) -> Vec<Plot> {
    let waited: Vec<i64> = verdict.told.iter().filter_map(|told| told.waited_us).collect();
    let audit = &evidence.audit;
    let lateness = [
        ("nothing suspended", &audit.lateness_us[..]),
        ("server stopped, paused or busy by a fault", &audit.lateness_suspended_us),
    ];
    let kinds: Vec<_> = evidence.faults.by_kind().into_iter().collect();
    let outages: Vec<_> = verdict.unavailable_us_by_kind().into_iter().collect();
    let mut plots = Vec::new();
    let mut plot = |is_shown: bool, file, caption, drawing: &dyn Fn(&Path) -> Drawn| {
        if is_shown {
            drawing(&folder.join(file)).unwrap_or_else(|error| panic!("cannot draw {file}: {error}"));
            plots.push((file, caption));
        }
    };
    plot(!evidence.events.is_empty(), "over-time.svg", "Grants and faults per second", &|path| {
        over_time(path, evidence, &verdict.told)
    });
    plot(!waited.is_empty(), "waits.svg", "How long clients waited for a grant", &|path| {
        distributions(path, "Waited for a grant, in BLOCK or QUEUE, by the client's clock", "grants", &[("", &waited)])
    });
    plot(!kinds.is_empty(), "faults.svg", "Faults by kind", &|path| faults(path, &kinds));
    plot(!outages.is_empty(), "unavailable.svg", "How long nobody was granted a lock after an outage", &|path| {
        unavailable(path, &outages)
    });
    plot(
        lateness.iter().any(|(_, values)| !values.is_empty()),
        "lateness.svg",
        "How late the server performed what was due",
        &|path| distributions(path, "Lateness of what was due, by the server's count", "times seen", &lateness),
    );
    plots
}

fn white(path: &Path, height: u32) -> Result<Area<'_>, Box<dyn Error>> {
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    Ok(root)
}

/// One panel for the grants and one for each group of faults, each with a scale of its own: a kill is rare, and a grant is not.
fn over_time(path: &Path, evidence: &Evidence, told: &[Told]) -> Drawn {
    const GRANTS_HEIGHT: u32 = 200;
    const GROUP_HEIGHT: u32 = 80;
    const AXIS_HEIGHT: u32 = 46;
    let from_ns = evidence.events.first().map_or(0, |event| event.at_ns);
    let until_ns = evidence.events.last().map_or(0, |event| event.at_ns);
    let width_s = ((until_ns - from_ns) / 1_000_000_000 + 1).div_ceil(BARS_MAX);
    let times = Times { from_ns, until_ns, width_s };
    let grants = format!("grants per second, as clients heard of them: {} in all", told.len());
    let mut panels = vec![(GRANTS_HEIGHT, grants, BAR, times.per_second(told.iter().map(|told| told.at_ns)))];
    for group in Group::ALL {
        let of_group = evidence.faults.faults.iter().filter(|(_, _, kind, _)| kind.group() == group);
        let begun: Vec<u64> = of_group.map(|(from_ns, ..)| *from_ns).collect();
        if !begun.is_empty() {
            let label = format!("faults per second, {}: {} in all", group.words(), begun.len());
            panels.push((GROUP_HEIGHT, label, group.colour(), times.per_second(begun.into_iter())));
        }
    }
    let height: u32 = panels.iter().map(|(height, ..)| height).sum();
    let mut rest = white(path, height + AXIS_HEIGHT)?;
    let last = panels.len() - 1;
    for (number, (height, label, colour, rates)) in panels.iter().enumerate() {
        let with_axis = number == last;
        let (area, below) = rest.split_vertically(height + if with_axis { AXIS_HEIGHT } else { 0 });
        panel(&area, &times, label, *colour, rates, with_axis)?;
        rest = below;
    }
    rest.present()?;
    Ok(())
}

/// The time of a run, in bars of some seconds.
struct Times {
    from_ns: u64,
    until_ns: u64,
    width_s: u64,
}

impl Times {
    fn width_ns(&self) -> u64 {
        self.width_s * 1_000_000_000
    }

    /// How many a second, in each bar. The last bar may reach beyond the end.
    fn per_second(&self, times_ns: impl Iterator<Item = u64>) -> Vec<f64> {
        let bar = |at_ns: u64| usize::try_from((at_ns - self.from_ns) / self.width_ns()).unwrap_or(usize::MAX);
        let mut rates = vec![0.0; bar(self.until_ns) + 1];
        for at_ns in times_ns {
            rates[bar(at_ns.clamp(self.from_ns, self.until_ns))] += 1.0 / self.width_s as f64;
        }
        rates
    }
}

fn panel(area: &Area<'_>, times: &Times, label: &str, colour: RGBColor, rates: &[f64], with_axis: bool) -> Drawn {
    let starts = || (0..rates.len()).map(|bar| bar as f64 * times.width_s as f64);
    let seconds = rates.len() as f64 * times.width_s as f64;
    let most = rates.iter().fold(0.0, |most: f64, rate| most.max(*rate));
    let top = if most > 0.0 { most * 1.1 } else { 1.0 };
    let mut chart = ChartBuilder::on(area)
        .caption(label, TITLE)
        .margin_left(8)
        .margin_right(20)
        .margin_bottom(if with_axis { 6 } else { 0 })
        .x_label_area_size(if with_axis { 40 } else { 2 })
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..seconds, 0.0..top)?;
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .light_line_style(WHITE)
        .y_labels(3)
        .y_label_formatter(&short)
        .label_style(TICK)
        .axis_desc_style(LABEL);
    if with_axis {
        mesh.x_desc("seconds since the beginning").x_label_formatter(&short);
    } else {
        mesh.x_labels(0);
    }
    mesh.draw()?;
    let bar = |(from_s, rate): (f64, &f64)| {
        Rectangle::new([(from_s, 0.0), (from_s + times.width_s as f64, *rate)], colour.filled())
    };
    chart.draw_series(starts().zip(rates).filter(|(_, rate)| **rate > 0.0).map(bar))?;
    Ok(())
}

/// How often something took how long, in panels with one scale of time, with the quantiles that the tables have.
fn distributions(path: &Path, title: &str, unit: &str, of: &[(&str, &[i64])]) -> Drawn {
    const PANEL_HEIGHT: u32 = 300;
    let of: Vec<_> = of.iter().filter(|(_, values)| !values.is_empty()).collect();
    let edges = edges(of.iter().flat_map(|(_, values)| values.iter().copied()));
    // Room beside the longest time is for its name.
    let scale = decades(&edges, 4.0);
    let root = white(path, PANEL_HEIGHT * u32::try_from(of.len())?)?;
    for (area, (name, values)) in root.split_evenly((of.len(), 1)).iter().zip(of) {
        let counts = counts(&edges, values);
        let most = counts.iter().fold(0.0, |most: f64, count| most.max(*count));
        let label = if name.is_empty() { title.to_owned() } else { format!("{title}: {name}") };
        // Bars stand on less than one, so that one is seen. Room above is for the quantiles.
        let floor = 0.7;
        let mut chart = ChartBuilder::on(area)
            .caption(label, TITLE)
            .margin(8)
            .margin_right(20)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(scale.clone().log_scale(), (floor..most * 20.0).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .x_desc("ms (log scale)")
            .y_desc(format!("{unit}, {} in all (log scale)", values.len()))
            .x_label_formatter(&short)
            .y_label_formatter(&short)
            .label_style(TICK)
            .axis_desc_style(LABEL)
            .draw()?;
        let bars = edges.windows(2).zip(&counts).filter(|(_, count)| **count > 0.0);
        chart.draw_series(
            bars.map(|(between, count)| Rectangle::new([(between[0], floor), (between[1], *count)], BAR.filled())),
        )?;
        let Some(Quantiles { p50, p99, max }) = Quantiles::of(values) else { continue };
        for (name, value_us, height) in [("p50", p50, 11.0), ("p99", p99, 5.5), ("max", max, 2.7)] {
            let (x, top) = (shown_ms(value_us), most * height);
            let line = [(x, floor), (x, top)];
            chart.draw_series([PathElement::new(line, MARK.stroke_width(2))])?;
            let text = format!("{name} {}", in_ms(value_us));
            chart.draw_series([EmptyElement::at((x, top)) + Text::new(text, (4, -6), LABEL)])?;
        }
    }
    root.present()?;
    Ok(())
}

/// Between which times the bars are, in milliseconds: in equal steps on a log scale.
fn edges(values_us: impl Iterator<Item = i64>) -> Vec<f64> {
    let (least, most) = values_us.fold((f64::MAX, f64::MIN), |(least, most), value_us| {
        (least.min(shown_ms(value_us)), most.max(shown_ms(value_us)))
    });
    let step = 2_f64.powf(1.0 / BARS_PER_DOUBLING);
    let all = std::iter::successors(Some(MS_MIN), |edge| (*edge <= most).then_some(edge * step));
    let mut edges: Vec<f64> = all.collect();
    edges.drain(..edges.partition_point(|edge| *edge <= least).saturating_sub(1));
    edges
}

/// A scale on which these times are, with so much room above, from one power of ten to another: a log scale shows no others.
fn decades(edges: &[f64], room: f64) -> Range<f64> {
    let power = |ms: f64, to: fn(f64) -> f64| 10_f64.powf(to(ms.log10()));
    let (low, high) = (edges[0], edges[edges.len() - 1]);
    power(low, f64::floor)..power(high * room, f64::ceil)
}

fn counts(edges: &[f64], values_us: &[i64]) -> Vec<f64> {
    let mut counts = vec![0.0; edges.len() - 1];
    for value_us in values_us {
        counts[edges.partition_point(|edge| *edge <= shown_ms(*value_us)) - 1] += 1.0;
    }
    counts
}

fn shown_ms(value_us: i64) -> f64 {
    (value_us as f64 / 1e3).max(MS_MIN)
}

fn in_ms(value_us: i64) -> String {
    let ms = value_us as f64 / 1e3;
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
}

/// A heading for each group, and below it a bar for each kind.
fn faults(path: &Path, kinds: &[(Kind, usize)]) -> Drawn {
    const ROW: i32 = 20;
    const LEFT: i32 = 260;
    const BAR_MAX: f64 = 560.0;
    const TOP: i32 = 40;
    let of = |group: Group| kinds.iter().filter(move |(kind, _)| kind.group() == group);
    let groups: Vec<Group> = Group::ALL.into_iter().filter(|group| of(*group).next().is_some()).collect();
    let rows = i32::try_from(kinds.len() + groups.len())?;
    let root = white(path, u32::try_from(TOP + ROW * rows + 10)?)?;
    let all: usize = kinds.iter().map(|(_, count)| count).sum();
    root.draw(&Text::new(format!("Faults injected, by kind: {all} in all"), (20, 12), TITLE))?;
    let most = kinds.iter().map(|(_, count)| *count).max().unwrap_or(1);
    let mut y = TOP;
    for group in groups {
        let sum: usize = of(group).map(|(_, count)| count).sum();
        root.draw(&Text::new(format!("{}: {sum}", group.words()), (20, y + 4), LABEL))?;
        y += ROW;
        for (kind, count) in of(group) {
            #[expect(clippy::cast_possible_truncation, reason = "a width in pixels")]
            let right = LEFT + (*count as f64 / most as f64 * BAR_MAX) as i32;
            root.draw(&Rectangle::new([(LEFT, y), (right.max(LEFT + 1), y + ROW - 4)], group.colour().filled()))?;
            root.draw(&Text::new(kind.words(), (40, y + 2), LABEL))?;
            root.draw(&Text::new(count.to_string(), (right + 8, y + 2), LABEL))?;
            y += ROW;
        }
    }
    root.present()?;
    Ok(())
}

/// A row for each kind of outage, a dot for each outage.
fn unavailable(path: &Path, outages: &[(Kind, Vec<i64>)]) -> Drawn {
    const ROW: u32 = 44;
    const TOP_AND_AXIS: u32 = 100;
    let rows = outages.len();
    let root = white(path, TOP_AND_AXIS + ROW * u32::try_from(rows)?)?;
    let edges = edges(outages.iter().flat_map(|(_, values)| values.iter().copied()));
    // The first row is the uppermost.
    let height = |row: usize| (rows - row) as f64 - 0.5;
    let mut chart = ChartBuilder::on(&root)
        .caption("From an outage until somebody was granted a lock asked for after it", TITLE)
        .margin(8)
        .margin_left(220)
        .margin_right(190)
        .x_label_area_size(40)
        .build_cartesian_2d(decades(&edges, 1.0).log_scale(), 0.0..rows as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE)
        .y_labels(0)
        .x_desc("ms (log scale), a dot for each outage")
        .x_label_formatter(&short)
        .label_style(TICK)
        .axis_desc_style(LABEL)
        .draw()?;
    for (row, (kind, values_us)) in outages.iter().enumerate() {
        let dot = |value_us: &i64| {
            Circle::new((shown_ms(*value_us), height(row)), 4, kind.group().colour().mix(0.5).filled())
        };
        chart.draw_series(values_us.iter().map(dot))?;
        let Some(Quantiles { p50, max, .. }) = Quantiles::of(values_us) else { continue };
        let middle = chart.backend_coord(&(shown_ms(p50), height(row)));
        root.draw(&Rectangle::new([(middle.0 - 1, middle.1 - 12), (middle.0 + 1, middle.1 + 12)], BLACK.filled()))?;
        root.draw(&Text::new(format!("{} ({})", kind.words(), values_us.len()), (8, middle.1 - 6), LABEL))?;
        let quantiles = format!("p50 {}, max {}", in_ms(p50), in_ms(max));
        root.draw(&Text::new(quantiles, (i32::try_from(WIDTH)? - 184, middle.1 - 6), LABEL))?;
    }
    root.present()?;
    Ok(())
}

fn short(value: &f64) -> String {
    if *value >= 10.0 { format!("{value:.0}") } else { format!("{}", (value * 100.0).round() / 100.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_keep_every_event() {
        let times = Times { from_ns: 1_000_000_000, until_ns: 8_500_000_000, width_s: 2 };
        let at = [900_000_000, 1_000_000_000, 2_999_999_999, 3_000_000_000, 8_500_000_000, 9_000_000_000];
        assert_eq!(times.per_second(at.into_iter()), [1.5, 0.5, 0.0, 1.0]);
    }

    #[test]
    fn every_value_has_a_bar() {
        let values_us = [-3, 0, 10, 999, 1000, 1001, 2_681_000];
        let edges = edges(values_us.into_iter());
        assert_eq!(edges[0], MS_MIN);
        assert!(edges[edges.len() - 2] <= 2681.0 && 2681.0 < edges[edges.len() - 1], "{edges:?}");
        let counts = counts(&edges, &values_us);
        assert_eq!(counts[0], 3.0);
        assert_eq!(counts.iter().sum::<f64>(), 7.0);
        assert_eq!(super::edges([5000].into_iter()).len(), 2);
    }
}
