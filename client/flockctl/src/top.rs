//! `top`: the held locks, the longest queue first, and what goes on at the server; again and again until somebody has seen enough.

use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Duration, Instant};

use flock_client::{Flock, HeldLock, Stats};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table};
use ratatui::{DefaultTerminal, Frame};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use crate::cli::{ServerArgs, TopArgs};
use crate::failure::Failure;
use crate::job::killed_by;
use crate::locks;
use crate::output::{self, Bytes, brief};
use crate::signals::{ENDING, Signals};

/// More locks fit on no screen.
const SHOWN_MAX: usize = 1_000;
const PAGE: u32 = 1_000;
/// A server with millions is not to be asked for all of them each second.
const PAGES_MAX: usize = 100;
/// What is counted, and its name on the screen.
const RATES: [(&str, &str); 7] = [
    ("flock_grants", "grants"),
    ("flock_handoffs", "handoffs"),
    ("flock_releases", "releases"),
    ("flock_renewals", "renewals"),
    ("flock_busy", "busy"),
    ("flock_timed_out", "timed out"),
    ("flock_expired", "expired"),
];

pub(crate) async fn top(server: &ServerArgs, args: &TopArgs) -> Result<u8, Failure> {
    let flock = server.connect().await?;
    let pattern = std::os::unix::ffi::OsStrExt::as_bytes(args.pattern.as_os_str()).to_vec();
    if args.json {
        return output::print_json(&View::ask(&flock, &pattern).await?.json());
    }
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return output::print(View::ask(&flock, &pattern).await?.text());
    }
    watch(flock, pattern, args.interval).await
}

/// What the server answered at one moment.
#[derive(Clone, Debug)]
struct View {
    at: Instant,
    stats: Stats,
    /// Those with the longest queues.
    locks: Vec<HeldLock>,
    /// How many were looked at, if that is not all there are.
    of_the_first: Option<usize>,
}

impl View {
    async fn ask(flock: &Flock, pattern: &[u8]) -> Result<Self, Failure> {
        let stats = flock.stats().await?;
        let mut pages = flock.list(pattern).page_size(PAGE);
        let (mut locks, mut seen) = (Vec::new(), 0);
        for _ in 0..PAGES_MAX {
            let Some(page) = pages.next_page().await? else {
                return Ok(Self { at: Instant::now(), stats, locks, of_the_first: None });
            };
            seen += page.len();
            locks.extend(page);
            locks.sort_by(|a, b| b.waiter_count.cmp(&a.waiter_count).then_with(|| a.key.cmp(&b.key)));
            locks.truncate(SHOWN_MAX);
        }
        Ok(Self { at: Instant::now(), stats, locks, of_the_first: Some(seen) })
    }

    fn number(&self, name: &str) -> i64 {
        self.stats.number(name).unwrap_or(0)
    }

    /// How often a second, since an earlier view. A server that was restarted meanwhile counts from zero.
    fn rate(&self, earlier: Option<&Self>, name: &str) -> Option<f64> {
        let earlier = earlier?;
        let (now, then) = (self.number(name), earlier.number(name));
        #[expect(clippy::cast_precision_loss, reason = "it is shown to a tenth")]
        let change = if now < then { now } else { now - then } as f64;
        Some(change / self.at.duration_since(earlier.at).as_secs_f64().max(0.001))
    }

    fn gauges(&self) -> String {
        let cut = self.of_the_first.map_or_else(String::new, |seen| format!("; below, of the first {seen}"));
        format!("{} held, {} waiting{cut}", self.number("flock_held"), self.number("flock_waiters"))
    }

    fn text(&self) -> String {
        let counts: Vec<_> = RATES.iter().map(|(field, name)| format!("{} {name}", self.number(field))).collect();
        format!("{}\nsince the start: {}\n\n{}", self.gauges(), counts.join(", "), locks::held_locks_table(&self.locks))
    }

    fn json(&self) -> Value {
        let stats: serde_json::Map<_, _> = self
            .stats
            .iter()
            .map(|(name, text)| (name.to_owned(), text.parse::<i64>().map_or_else(|_| json!(text), |n| json!(n))))
            .collect();
        json!({ "stats": stats, "complete": self.of_the_first.is_none(), "locks": self.locks.iter().map(locks::held_lock_json).collect::<Vec<_>>() })
    }
}

/// What is on the screen: the last view, the one before, and why there is none newer.
#[derive(Clone, Debug, Default)]
struct Screen {
    last: Option<View>,
    before: Option<View>,
    trouble: Option<String>,
}

/// Gives the terminal back, however it goes. On a panic ratatui's hook does it before the message is printed.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn watch(flock: Flock, pattern: Vec<u8>, interval: Duration) -> Result<u8, Failure> {
    let mut signals = Signals::default();
    signals.take(ENDING)?;
    let (screens, mut screen) = watch::channel(Screen::default());
    tokio::spawn(async move {
        loop {
            match View::ask(&flock, &pattern).await {
                Ok(view) => screens.send_modify(|screen| {
                    screen.before = screen.last.replace(view);
                    screen.trouble = None;
                }),
                Err(failure) => screens.send_modify(|screen| screen.trouble = Some(failure.to_string())),
            }
            sleep(interval).await;
        }
    });
    let mut terminal = ratatui::try_init()?;
    let _restore = Restore;
    let mut events = events();
    loop {
        draw(&mut terminal, &screen.borrow_and_update())?;
        tokio::select! {
            event = events.recv() => match event {
                Some(Event::Key(key)) if quits(&key) => return Ok(0),
                Some(_) => {}
                None => return Ok(0), // the terminal is gone
            },
            signal = signals.next() => return Ok(killed_by(signal.as_raw())),
            _ = screen.changed() => {}
        }
    }
}

/// The keys, read by a thread that ends with the process.
fn events() -> mpsc::Receiver<Event> {
    let (events, received) = mpsc::channel(16);
    thread::spawn(move || {
        while let Ok(event) = event::read() {
            if events.blocking_send(event).is_err() {
                return;
            }
        }
    });
    received
}

fn quits(key: &event::KeyEvent) -> bool {
    let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

fn draw(terminal: &mut DefaultTerminal, screen: &Screen) -> io::Result<()> {
    terminal.draw(|frame| paint(frame, screen)).map(drop)
}

fn paint(frame: &mut Frame<'_>, screen: &Screen) {
    let [head, body] = Layout::vertical([Constraint::Length(3), Constraint::Min(0)]).areas(frame.area());
    let waits = if output::colours() { Style::new().fg(Color::Yellow) } else { Style::new() };
    let Some(view) = &screen.last else {
        let text = screen.trouble.as_deref().unwrap_or("asking the server ...");
        frame.render_widget(Paragraph::new(text), head);
        return;
    };
    let rates: Vec<_> = RATES
        .iter()
        .filter_map(|(field, name)| Some(format!("{:.1} {name}", view.rate(screen.before.as_ref(), field)?)))
        .collect();
    let rates = if rates.is_empty() { String::new() } else { format!("a second: {}", rates.join(", ")) };
    let trouble = screen.trouble.as_deref().unwrap_or_default();
    frame.render_widget(
        Paragraph::new(vec![
            Line::from(format!("{}     q: quit", view.gauges())),
            Line::from(rates),
            Line::styled(trouble.to_owned(), waits),
        ]),
        head,
    );
    let header = Row::new(["KEY", "MODE", "HOLDERS", "WAITERS", "TOKEN", "LEFT", "OWNER"])
        .style(Style::new().add_modifier(Modifier::BOLD));
    let rows = view.locks.iter().map(|lock| {
        let waiters = Cell::from(lock.waiter_count.to_string());
        Row::new([
            Cell::from(Bytes(&lock.key).to_string()),
            Cell::from(output::mode(Some(lock.mode))),
            Cell::from(lock.holder_count.to_string()),
            if lock.waiter_count > 0 { waiters.style(waits) } else { waiters },
            Cell::from(lock.token.to_string()),
            Cell::from(brief(lock.remaining)),
            Cell::from(Bytes(&lock.owner).to_string()),
        ])
    });
    let widths = [
        Constraint::Fill(3),
        Constraint::Length(9),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(16),
        Constraint::Length(9),
        Constraint::Fill(2),
    ];
    frame.render_widget(Table::new(rows, widths).header(header), body);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn shown(screen: &Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(90, 6)).unwrap();
        terminal.draw(|frame| paint(frame, screen)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn trouble_is_shown_beside_the_last_view() {
        let view = View { at: Instant::now(), stats: Stats::default(), locks: vec![], of_the_first: Some(7) };
        let trouble = Some("the server cannot be reached".to_owned());
        let screen = Screen { last: Some(view), before: None, trouble };
        let text = shown(&screen);
        assert!(
            text.contains("0 held, 0 waiting; below, of the first 7") && text.contains("the server cannot be reached"),
            "{text}"
        );
    }

    #[test]
    fn first_screen_says_that_it_asks() {
        assert!(shown(&Screen::default()).contains("asking the server"));
    }

    #[test]
    fn rate_is_the_change_by_the_time() {
        let now = Instant::now();
        let earlier = View { at: now, stats: Stats::default(), locks: vec![], of_the_first: None };
        let later = View { at: now + Duration::from_secs(2), ..earlier.clone() };
        assert_eq!(later.rate(Some(&earlier), "flock_grants"), Some(0.0));
        assert_eq!(later.rate(None, "flock_grants"), None);
    }
}
