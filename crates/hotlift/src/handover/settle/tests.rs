//! Both sides of the question on a virtual clock, over a network that loses, delays, duplicates, truncates and corrupts.

use fastrand::Rng;
use hotlift_wire::settle::{QUESTION_LEN, answer, question, read_question};

use super::*;
use crate::handover::DestinationSide;
use crate::options::Options;

const ID: MigrationId = MigrationId([7; 16]);

const MS: Duration = Duration::from_millis(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn each_limit_of_the_source_holds_to_the_millisecond() {
    let begun = Instant::now();
    let timeout = Duration::from_secs(60);
    let at = |time: Duration| begun + time;

    let mut question = Question::after_commit(begun, timeout, true);
    assert_eq!(question.next(begun), Some(Step::Listen(QUERY_DELAY)));
    assert_eq!(question.next(at(QUERY_DELAY)), Some(Step::Ask(ATTEMPT)));
    assert_eq!(question.next(at(QUERY_DELAY)), Some(Step::Pause(PAUSE)));
    let late = at(timeout - MS);
    assert_eq!(question.next(late), Some(Step::Ask(MS)), "before the limit");
    assert_eq!(question.next(at(timeout)), None, "at the limit");
    assert_eq!(question.next(at(timeout)), None, "for good");

    // The stream may end early: then the source asks at once.
    let mut question = Question::after_commit(begun, timeout, true);
    question.next(begun);
    assert_eq!(question.next(at(MS)), Some(Step::Ask(ATTEMPT)));

    let mut question = Question::after_commit(begun, ms(50), true);
    assert_eq!(question.next(begun), Some(Step::Listen(ms(50))));
    assert_eq!(question.next(at(ms(49))), Some(Step::Ask(MS)));

    let mut silent = Question::after_commit(begun, timeout, false);
    assert_eq!(silent.next(begun), Some(Step::Listen(timeout)));
    assert_eq!(silent.next(at(MS)), None, "a QEMU takes no questions");

    let mut paused = Question::while_paused(begun, timeout);
    assert_eq!(paused.next(begun), Some(Step::Pause(PAUSE)));
    assert_eq!(paused.next(at(PAUSE)), Some(Step::Ask(PAUSED_ATTEMPT)));
    assert_eq!(paused.next(at(timeout - MS)), Some(Step::Pause(MS)));
    assert_eq!(paused.next(at(timeout)), None);
}

#[test]
fn a_destination_answers_as_long_as_a_source_can_query_and_less_after_a_cancel() {
    let begun = Instant::now();
    let timeout = Options::default().limits.time_for_questions();
    let at = |time: Duration| begun + time;
    let mut period = AnswerPeriod::new(begun, timeout);
    assert_eq!(period.left(at(timeout - MS), false), Some(MS));
    assert_eq!(period.left(at(timeout), false), None);

    let mut period = AnswerPeriod::new(begun, timeout);
    assert_eq!(period.left(at(MS), true), Some(CANCELLED));
    // A second cancel, or the same one checked again, gives no more time.
    assert_eq!(period.left(at(CANCELLED), true), Some(MS));
    assert_eq!(period.left(at(CANCELLED + MS), true), None);

    let mut period = AnswerPeriod::new(begun, timeout);
    assert_eq!(period.left(at(timeout - MS), true), Some(MS), "no longer");
}

/// Returns each variant of `bytes` with one bit flipped.
fn flipped<const N: usize>(bytes: [u8; N]) -> impl Iterator<Item = [u8; N]> {
    (0..N * 8).map(move |bit| {
        let mut bytes = bytes;
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes
    })
}

#[test]
fn no_flipped_bit_yields_a_statement_or_another_query() {
    let outcomes = [
        (Outcome::Unknown, None),
        (Outcome::Undecided, None),
        (Outcome::Runs, Some(DestinationStatement::Runs)),
        (Outcome::Never, Some(DestinationStatement::Never)),
        (Outcome::HasAll, Some(DestinationStatement::HasAll)),
    ];
    for (outcome, word) in outcomes {
        for activity in [
            GuestActivity::Unknown,
            GuestActivity::Runs,
            GuestActivity::Rests,
            GuestActivity::Stopped,
        ] {
            let whole = answer(ID, outcome, activity);
            assert_eq!(statement(&whole, ID), word.map(|word| (word, activity)));
            assert_eq!(statement(&whole, MigrationId([8; 16])), None);
            assert!(flipped(whole).all(|answer| statement(&answer, ID).is_none()));
        }
    }
    assert_eq!(read_question(&question(ID)).unwrap(), ID);
    assert!(flipped(question(ID)).all(|question| read_question(&question).is_err()));
}

#[test]
fn a_confirmation_counts_only_complete_and_last_in_any_fragments() {
    let stream = [&b"pages, END, EOF"[..], &confirmation(ID)].concat();
    for first in 0..=stream.len() {
        for second in first..=stream.len() {
            let mut confirmation = Confirmation::default();
            let mut is_there = false;
            for piece in [&stream[..first], &stream[first..second], &stream[second..]] {
                assert!(!is_there || piece.is_empty(), "before its end");
                is_there = confirmation.take(piece, ID);
            }
            assert!(is_there);
        }
        let cut = Confirmation::default().take(&stream[..first], ID);
        assert_eq!(cut, first == stream.len());
    }
    let confirms = |bytes: &[u8]| Confirmation::default().take(bytes, ID);
    assert!(flipped(confirmation(ID)).all(|received| !confirms(&received)));
    assert!(!confirms(&confirmation(MigrationId([8; 16]))));
}

/// Event at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum There {
    Commit,
    Runs,
    Refuses,
    Panics,
}

/// A source and a destination after the source's commit at time 0.
struct Pair {
    rng: Rng,
    epoch: Instant,
    now: Duration,
    side: DestinationSide,
    events: Vec<(Duration, There)>,
    period: AnswerPeriod,
    cancelled: Option<Duration>,
    confirmation: Confirmation,
    confirmed: bool,
    /// Time from which on the network loses nothing.
    network_is_back: Duration,
    timeout: Duration,
}

/// Longest delay of one message on a working network, in milliseconds.
const WAY: u64 = 500;

impl Pair {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let options = Options::default();
        let (timeout, all) = (
            options.limits.settle_timeout,
            options.limits.time_for_questions(),
        );
        // The source commits when it learns that all is loaded: up to `handshake` after the destination sent this.
        let handshake = u64::try_from((all - timeout).as_millis()).unwrap();
        let epoch = Instant::now() + all;
        let begun = epoch - ms(rng.u64(0..=handshake));
        let commit = ms(rng.u64(0..8000));
        let decided = commit + ms(rng.u64(0..40_000));
        let mut events = Vec::new();
        if rng.u8(0..4) > 0 {
            events.push((commit, There::Commit));
            let then = *rng
                .choice(&[There::Runs, There::Runs, There::Refuses, There::Panics])
                .unwrap();
            events.push((decided, then));
        }
        Self {
            epoch,
            now: Duration::ZERO,
            side: DestinationSide::Loaded,
            events,
            period: AnswerPeriod::new(begun, all),
            cancelled: (rng.u8(0..5) == 0).then(|| ms(rng.u64(0..60_000))),
            confirmation: Confirmation::default(),
            confirmed: false,
            network_is_back: match rng.u8(0..3) {
                0 => Duration::ZERO,
                1 => ms(rng.u64(0..60_000)),
                _ => Duration::MAX,
            },
            timeout,
            rng,
        }
    }

    /// Advances the destination to `time`.
    fn advance(&mut self, time: Duration) {
        let side = &mut self.side;
        self.events.retain(|(at, event)| {
            if *at > time {
                return true;
            }
            match event {
                There::Commit => side.commit(),
                There::Runs => side.record_run(),
                There::Refuses => side.refused(),
                There::Panics => side.unsure(),
            };
            false
        });
    }

    /// Makes one attempt of the source, which takes up to `within`.
    fn ask(&mut self, within: Duration) -> Option<(DestinationStatement, GuestActivity)> {
        let (asked, limit) = (self.now, self.now + within);
        let is_back = asked >= self.network_is_back;
        let fate = if is_back { 0 } else { self.rng.u8(0..8) };
        if fate == 1 {
            // The connection is refused at once.
            return None;
        }
        self.now = limit;
        if fate == 2 {
            return None;
        }
        let mut sent = question(ID);
        if fate == 3 {
            let bit = self.rng.usize(0..QUESTION_LEN * 8);
            sent[bit / 8] ^= 1 << (bit % 8);
        }
        let longest = if fate == 4 { 4 * WAY } else { WAY };
        let came = asked + ms(self.rng.u64(0..longest));
        self.advance(came);
        let is_cancelled = self.cancelled.is_some_and(|at| at <= came);
        let left = self.period.left(self.epoch + came, is_cancelled);
        let is_late = came >= self.timeout;
        assert!(left.is_some() || is_cancelled || is_late, "it may be asked");
        left?;
        let id = read_question(&sent).ok()?;
        let mut answered = answer(id, self.side.ask(), GuestActivity::Runs).to_vec();
        match fate {
            5 => {
                let bit = self.rng.usize(0..ANSWER_LEN * 8);
                answered[bit / 8] ^= 1 << (bit % 8);
            }
            6 => answered.truncate(self.rng.usize(0..ANSWER_LEN)),
            7 => answered.extend_from_within(..),
            _ => {}
        }
        let back = came + ms(self.rng.u64(0..longest));
        if back >= limit {
            return None;
        }
        let statement = statement(answered.first_chunk()?, ID)?;
        self.now = back;
        if fate != 4 {
            self.confirmed |= self.confirmation.take(&confirmation(ID), ID);
        }
        Some(statement)
    }

    /// Runs the source to its end.
    fn run(&mut self) -> Option<(DestinationStatement, GuestActivity)> {
        let mut question = Question::after_commit(self.epoch, self.timeout, true);
        while let Some(step) = question.next(self.epoch + self.now) {
            let before = self.now;
            assert!(before < self.timeout || matches!(step, Step::Listen(_)));
            match step {
                // The stream was cut during the wait.
                Step::Listen(wait) => self.now += wait.mul_f64(self.rng.f64()),
                Step::Pause(wait) => self.now += wait,
                Step::Ask(within) => {
                    let output = self.ask(within);
                    if output.is_some() {
                        return output;
                    }
                }
            }
            assert!(self.now <= self.timeout, "{step:?} is too long");
        }
        assert_eq!(
            self.now, self.timeout,
            "in doubt at its limit, and not before"
        );
        None
    }
}

#[test]
fn a_source_learns_the_true_outcome_as_soon_as_the_network_allows() {
    let mut output = [0; 3];
    for seed in 0..20_000 {
        let mut pair = Pair::new(seed);
        let decided = pair.events.last().map_or(Duration::ZERO, |(at, _)| *at);
        let panics = pair.events.last().is_some_and(|it| it.1 == There::Panics);
        let statement = pair.run().map(|(word, _)| word);
        pair.advance(Duration::MAX);
        let is_true = match statement {
            Some(DestinationStatement::Runs) => pair.side == DestinationSide::Runs,
            Some(DestinationStatement::Never) => pair.side == DestinationSide::Never,
            Some(DestinationStatement::HasAll) => false,
            None => true,
        };
        assert!(is_true, "seed {seed}: {statement:?}, {:?}", pair.side);
        // The longest case: one attempt begins just too early, and the next one is answered.
        let answered = decided.max(pair.network_is_back);
        let answered = answered.saturating_add(ATTEMPT + PAUSE + 2 * ms(WAY));
        let is_sure = answered.max(QUERY_DELAY + 2 * ms(WAY)) < pair.timeout;
        if is_sure && pair.cancelled.is_none() && pair.side != DestinationSide::Unsure {
            assert!(statement.is_some(), "seed {seed}: in doubt for no reason");
        }
        assert!(
            !panics || statement != Some(DestinationStatement::Runs),
            "seed {seed}"
        );
        output[match statement {
            Some(DestinationStatement::Runs) => 0,
            Some(_) => 1,
            None => 2,
        }] += 1;
    }
    assert!(output.iter().all(|count| *count > 1000), "{output:?}");
}
