//! Sends a guest its missing pages over one connection: requested pages first, all other pages in the background.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use hotlift_net::transport::Stream;

use super::priority_lock::PriorityLock;
use super::request_queue::{FINAL_STATEMENT_TIMEOUT, ReaderWait, Request, RequestQueue};
use super::{Batch, EOF, Ledger, Next, OutputPath, Pages, Reader};
use crate::cpu_limit::{CpuBudget, CpuShare};
use crate::error::MigrationError;
use crate::handover::DestinationStatement;
use crate::life::threads::{caught, lower_priority, spawn};
use crate::pacing::Pacer;
use crate::stream::main_send::{MainLink, MainSend, PageRecords};
use crate::stream::preempt::PreemptOut;
use crate::stream::return_path::{Answers, AnswersGuard, Messages};

/// Maximum count of threads that send pages in the background.
const THREADS: usize = 4;

/// Separate connection for requested pages.
struct Preempt {
    channel: PreemptOut,
    ends_by_message: bool,
}

/// State that all threads of one connection share.
pub(crate) struct Connection<'a, P> {
    pub pages: &'a P,
    pub ledger: Arc<Ledger>,
    pub main: &'a PriorityLock<MainSend>,
    pub link: Arc<MainLink>,
    pub answers: &'a Answers,
    /// Separate connection for requested pages. If there is none, requested pages are sent on main, before all other pages.
    preempt: OnceLock<Preempt>,
    /// True once everything is written on main. Answers written later only concern the connection for requested pages, which
    /// the destination closes.
    ended: AtomicBool,
    /// Rate limit of the background, which sends pages that were not requested.
    pace: Arc<Pacer>,
    cpu: Arc<CpuBudget>,
}

impl<'a, P: Pages> Connection<'a, P> {
    /// Creates a connection that writes through `main`. The rate limit `pace` and the CPU limit `cpu` apply only to the
    /// background.
    pub(crate) fn new(
        (pages, ledger): (&'a P, Arc<Ledger>),
        (main, link): (&'a PriorityLock<MainSend>, Arc<MainLink>),
        answers: &'a Answers,
        (pace, cpu): (Arc<Pacer>, Arc<CpuBudget>),
    ) -> Self {
        Self {
            pages,
            ledger,
            main,
            link,
            answers,
            preempt: OnceLock::new(),
            ended: AtomicBool::new(false),
            pace,
            cpu,
        }
    }

    /// Sends requested pages over `stream` from now on. `ends_by_message` is true if the destination waits for an end message
    /// on `stream`, as QEMU 7.2 does.
    pub(crate) fn answer_on(&self, stream: Stream, ends_by_message: bool) {
        let channel = PreemptOut::new(stream, Arc::clone(&self.link.counters));
        let _ = self.preempt.set(Preempt {
            channel,
            ends_by_message,
        });
    }

    /// Records `error` if it is the first error, then ends every wait.
    pub(crate) fn fail(&self, error: MigrationError) {
        self.ledger.life.fail(error);
        self.close();
        self.answers.end();
    }

    /// Ends every wait, without recording an error.
    pub(crate) fn close(&self) {
        self.ledger.life.close();
        self.pages.abandon();
        self.link.transport.shutdown(Shutdown::Both);
        if let Some(preempt) = self.preempt.get() {
            preempt.channel.shut();
        }
    }

    /// Takes the first error; returns `None` if there was none.
    pub(crate) fn take_failure(&self) -> Option<MigrationError> {
        self.ledger.life.failure().take()
    }

    fn is_over(&self) -> bool {
        self.ledger.life.is_stopped()
    }

    /// Runs the reader thread: reads the destination's messages until the connection ends.
    pub(crate) fn receive(&self, messages: Messages) {
        let _ends = AnswersGuard(self.answers);
        if let Err(error) = caught(|| self.listen(messages)) {
            self.fail(error);
        }
        self.ledger.order.change(RequestQueue::end);
    }

    /// Runs the thread that answers page requests. Must run before the destination loads the devices, because loading may need
    /// pages.
    pub(crate) fn answer_all(&self) {
        if let Err(error) = caught(|| self.answer_requests())
            && !self.ended.load(Ordering::Acquire)
        {
            self.fail(error);
        }
    }

    /// Reads the destination's messages until the connection ends: page requests, and answers about the handover.
    fn listen(&self, mut messages: Messages) -> Result<(), MigrationError> {
        let mut current = None;
        loop {
            let read = messages.read(&self.link.transport, self.answers, |message, _| {
                self.ledger
                    .record(&mut current, &message, self.ledger.life.now())
            })?;
            if !read {
                return self.answers.ended(MigrationError::main_closed());
            }
        }
    }

    fn answer_requests(&self) -> Result<(), MigrationError> {
        let mut reader = self.pages.reader()?;
        let mut batch = Batch::default();
        while let Some(request) = self.ledger.next_request() {
            let answered = self.answer(&request, &mut reader, &mut batch);
            if answered.is_err() {
                self.ledger.order.change(|order| order.done(&request, None));
            }
            self.pages.unless_damaged(answered)?;
        }
        Ok(())
    }

    fn answer(
        &self,
        request: &Request,
        reader: &mut P::Reader<'_>,
        batch: &mut Batch,
    ) -> Result<(), MigrationError> {
        let Request { block, page, .. } = *request;
        let (ledger, order) = (&self.ledger, &self.ledger.order);
        self.pages.record_request(block, page);
        batch.clear();
        if !ledger.is_sent(block, page) {
            // The page is read before it is claimed: an unreadable page must not count as sent.
            reader.add_all(block, ledger.pages_of_group(block, page), batch)?;
        }
        if !ledger.claim(block, page) {
            order.change(|order| order.done(request, None));
            return Ok(());
        }
        // After a zero page, no other pages are predictable. After a huge page, its neighbours are not needed soon.
        let is_alone = batch.normal.is_empty() || ledger.has_huge_pages(block);
        let preempt = self.preempt.get().map(|preempt| &preempt.channel);
        let mut way = OutputPath::urgent(self.main, preempt);
        let sent = self.write(&mut way, block, batch);
        let now = ledger.life.now();
        let is_waiting = order.change(|order| {
            order.done(request, Some(now));
            order.is_waiting()
        });
        sent?;
        // On main, the next waiting request has priority over neighbours. Neighbours are never sent on the connection for
        // requested pages: the destination reads this connection only until it has all requested pages.
        if is_alone || (is_waiting && matches!(way, OutputPath::Main(_))) {
            return Ok(());
        }
        batch.clear();
        reader.follow(batch)?;
        if batch.is_empty() {
            return Ok(());
        }
        let turn = match way {
            OutputPath::Main(turn) => Some(turn),
            OutputPath::Alone(_) if self.takes_no_time() => self.main.try_take(),
            OutputPath::Alone(_) => None,
        };
        let Some(turn) = turn else {
            let batch = std::mem::take(batch);
            order.lock().queue_neighbours(block, batch);
            return Ok(());
        };
        batch.claim(block, ledger);
        self.write(&mut OutputPath::Main(turn), block, batch)
    }

    /// Returns true if neighbours of a requested page can be sent on main at once. Three conditions: no request waits, there is
    /// no rate limit, and the socket has room.
    fn takes_no_time(&self) -> bool {
        let is_waiting = self.ledger.order.lock().is_waiting();
        !is_waiting && !self.pace.is_limited() && self.link.transport.is_writable()
    }

    /// Sends the pages that were not requested, with up to `threads` threads. A thread's name is `name` with a number. Returns
    /// false if the connection has ended; another thread has recorded the cause.
    pub(crate) fn send_background<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        name: &str,
        threads: usize,
    ) -> Result<bool, MigrationError> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut running = Vec::new();
        for number in 0..threads.min(cores).min(THREADS) {
            running.push(spawn(scope, format!("{name}{number}"), || {
                self.send_the_rest()
            })?);
        }
        let mut outcome = Ok(());
        for thread in running {
            let ended = thread.join().and_then(|ended| ended);
            if ended.is_err() {
                // Makes the other threads stop, too.
                self.ledger.life.close();
                outcome = outcome.and(ended);
            }
        }
        outcome.map(|()| !self.is_over())
    }

    fn send_the_rest(&self) -> Result<(), MigrationError> {
        // Lowers the priority only if requested pages have a separate connection. Otherwise this thread has the lock that an
        // answer waits for.
        if self.preempt.get().is_some() {
            lower_priority();
        }
        let mut reader = self.pages.reader()?;
        let mut batch = Batch::default();
        let mut cpu = CpuShare::new(&self.cpu);
        let life = &self.ledger.life;
        let mut share = Vec::new().into_iter();
        while !self.is_over() {
            let sent = match self.ledger.next_of(&mut share) {
                Some(Next::Neighbours(block, neighbours)) => {
                    batch = neighbours;
                    let mut way = OutputPath::Main(self.main.take_after_urgent());
                    batch.claim(block, &self.ledger);
                    self.write(&mut way, block, &batch)
                }
                Some(Next::From((block, page))) => match self.ledger.has_huge_pages(block) {
                    false => self.send_from(block, page, &mut reader, &mut batch),
                    true => self.send_huge_page(block, page, &mut reader, &mut batch),
                },
                None => {
                    let Some(next) = self.pages.next()? else {
                        break;
                    };
                    reader.read_ahead(&next, &self.ledger)?;
                    share = next.into_iter();
                    continue;
                }
            };
            self.pages.unless_damaged(sent)?;
            if !batch.is_empty() {
                self.pace.wait(batch.content.len(), life);
                cpu.spend(life);
            }
        }
        Ok(())
    }

    fn send_from(
        &self,
        block: usize,
        page: usize,
        reader: &mut P::Reader<'_>,
        batch: &mut Batch,
    ) -> Result<(), MigrationError> {
        batch.clear();
        if !reader.prepare(block, page, &self.ledger)? {
            return Ok(());
        }
        let mut way = OutputPath::Main(self.main.take_after_urgent());
        reader.take(&self.ledger, batch)?;
        self.write(&mut way, block, batch)
    }

    /// Sends the huge page that contains page `page`. Sends nothing if the huge page is zero.
    fn send_huge_page(
        &self,
        block: usize,
        page: usize,
        reader: &mut P::Reader<'_>,
        batch: &mut Batch,
    ) -> Result<(), MigrationError> {
        batch.clear();
        let read = reader.add_all(block, self.ledger.pages_of_group(block, page), batch);
        if read.is_err() || batch.normal.is_empty() {
            batch.clear();
            return read;
        }
        let mut way = OutputPath::Main(self.main.take_after_urgent());
        if !self.ledger.claim(block, page) {
            batch.clear();
        }
        self.write(&mut way, block, batch)
    }

    /// Sends the pages of `batch` without a gap between them. Does nothing if `batch` is empty.
    fn write(
        &self,
        way: &mut OutputPath<'_>,
        block: usize,
        batch: &Batch,
    ) -> Result<(), MigrationError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.link
            .counters
            .add_pages(batch.normal.len(), batch.zero.len());
        let pages = PageRecords {
            block,
            zero: &batch.zero,
            normal: &batch.normal,
            content: &batch.content,
        };
        way.send(&self.ledger.blocks()[block].name, pages)
    }

    /// Waits until a QEMU has begun to read the connection for requested pages. Must be called between the end of the
    /// background and [`Self::end`].
    ///
    /// In QEMU 8.0 and later, a thread reads the requested pages. When this thread starts or returns from a pause, it checks if
    /// main has ended. If main has ended, the thread exits, and the guest waits for its pages forever. Once the thread reads,
    /// it continues until no page is awaited. If no page was sent to the thread before, one is sent now, to see that the thread
    /// reads. Over TCP this shows only that the page has reached the kernel of QEMU's host.
    pub(crate) fn wait_for_reader(&self) -> Result<(), MigrationError> {
        let Some(preempt) = self
            .preempt
            .get()
            .filter(|preempt| !preempt.ends_by_message)
        else {
            return Ok(());
        };
        let channel = &preempt.channel;
        if !channel.is_used() {
            match self.ledger.claim_any() {
                // Pages that the background has not sent are zero.
                Some((block, pages)) => {
                    let mut batch = Batch::default();
                    pages.for_each(|page| batch.add_zero(page));
                    self.write(&mut OutputPath::Alone(channel), block, &batch)?;
                }
                // No page can be requested any more, but an answer may still be in progress.
                None => self.ledger.end_and_drain(),
            }
        }
        let life = &self.ledger.life;
        let mut wait = ReaderWait::new(life.now());
        while channel.is_used() && !channel.is_read() {
            if self.is_over() {
                return Err(MigrationError::main_closed());
            }
            let again = wait.next(life.now())?;
            life.sleep_while(again, || true);
        }
        Ok(())
    }

    /// Ends the stream, which states that the destination has all pages. Waits for the destination's confirmation.
    pub(crate) fn end(&self) -> Result<(), MigrationError> {
        match self.preempt.get() {
            // The destination closes the connection for requested pages, once it has all requested pages.
            Some(preempt) if !preempt.ends_by_message => {}
            preempt => {
                // Finishes an answer in progress first. All pages requested later are zero; the end message implies this.
                self.ledger.end_and_drain();
                preempt.map_or(Ok(()), |preempt| preempt.channel.end())?;
            }
        }
        {
            let mut main = self.main.take();
            self.ended.store(true, Ordering::Release);
            main.complete();
            main.end_section(false)?;
            main.raw(&[EOF])?;
        }
        match self.answers.wait_statement(FINAL_STATEMENT_TIMEOUT) {
            Some(DestinationStatement::Runs | DestinationStatement::HasAll) => Ok(()),
            Some(DestinationStatement::Never) => Err(self.answers.refusal()),
            None => Err(MigrationError::Timeout {
                waiting_for: "the destination's message that it has all pages".to_owned(),
                waited: FINAL_STATEMENT_TIMEOUT,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use hotlift_mem::PAGE_SIZE;
    use hotlift_wire::RamBlockEntry;
    use hotlift_wire::main_channel::{
        Command, Configuration, DeviceLengths, MainDecoder, MainEvent, PageContent, Step,
    };

    use super::*;
    use crate::life::Life;
    use crate::lock::lock;
    use crate::postcopy::Place;

    /// Count of pages in a huge page.
    const HUGE: usize = 8;

    /// Counts of pages in the two RAM blocks: the first has small pages, the second has huge pages.
    const PAGES: [usize; 2] = [8, 4 * HUGE];

    /// A page that cannot be read.
    const BROKEN: Place = (1, 3 * HUGE + 2);

    /// Simulated RAM: zero, except for the pages listed here.
    struct Ram {
        full: [Place; 5],
        shares: Mutex<Vec<Vec<Place>>>,
    }

    impl Pages for Ram {
        type Reader<'p> = &'p Ram;

        fn reader(&self) -> Result<&Ram, MigrationError> {
            Ok(self)
        }

        fn next(&self) -> Result<Option<Vec<Place>>, MigrationError> {
            Ok(lock(&self.shares).pop())
        }

        fn unless_damaged(
            &self,
            outcome: Result<(), MigrationError>,
        ) -> Result<(), MigrationError> {
            match outcome {
                Err(MigrationError::Cancelled) => Ok(()),
                outcome => outcome,
            }
        }
    }

    impl Reader for &Ram {
        fn page(&mut self, block: usize, page: usize) -> Result<Option<&[u8]>, MigrationError> {
            match (block, page) {
                BROKEN => Err(MigrationError::Cancelled),
                place => Ok(self.full.contains(&place).then_some(&[1; PAGE_SIZE])),
            }
        }

        fn prepare(&mut self, _: usize, _: usize, _: &Ledger) -> Result<bool, MigrationError> {
            Ok(false)
        }

        fn take(&mut self, _: &Ledger, _: &mut Batch) -> Result<(), MigrationError> {
            unreachable!("nothing was made ready")
        }
    }

    /// Returns the pages of RAM in a stream, in order. The flag is true if the page is zero.
    fn pages_of(stream: &[u8]) -> Vec<(Place, bool)> {
        let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        let (mut at, mut pages) = (0, Vec::new());
        while let Step::Event { event, consumed } = decoder.next(&stream[at..]).unwrap() {
            at += consumed;
            if let MainEvent::RamPage {
                block,
                offset,
                content,
            } = event
            {
                let page = usize::try_from(offset).unwrap() / PAGE_SIZE;
                pages.push(((block, page), content == PageContent::Zero));
            }
        }
        assert_eq!(at, stream.len());
        pages
    }

    /// Runs `test` with a connection that sends pages of `ram`, and with the peer's end of the connection.
    fn connected<R>(ram: &Ram, test: impl FnOnce(&Connection<'_, Ram>, &Stream) -> R) -> R {
        let mut blocks = PAGES.map(|pages| RamBlockEntry::new("", (pages * PAGE_SIZE) as u64));
        blocks[0].name = "small".to_owned();
        blocks[1].name = "huge".to_owned();
        blocks[1].page_size = (HUGE * PAGE_SIZE) as u64;
        let (here, there) = Stream::pair().unwrap();
        let link = Arc::new(MainLink {
            transport: here,
            counters: Arc::default(),
            pacer: Arc::new(Pacer::new(0)),
            life: Life::default(),
        });
        let configuration = Configuration {
            machine: "hotlift".to_owned(),
            ..Configuration::default()
        };
        let mut main = MainSend::new(Arc::clone(&link), &configuration).unwrap();
        let sizes = Some((blocks[0].page_size | blocks[1].page_size, 4096));
        let advise = Command::PostcopyAdvise { page_sizes: sizes };
        main.command(advise).unwrap();
        main.ram_start(None, &blocks, false).unwrap();
        let main = PriorityLock::new(main);
        let ledger = Arc::new(Ledger::new(&blocks));
        let answers = Answers::new(&Life::default());
        let limits = (Arc::new(Pacer::new(0)), Arc::new(CpuBudget::new(0)));
        let connection = Connection::new((ram, ledger), (&main, link), &answers, limits);
        test(&connection, &there)
    }

    #[test]
    fn a_huge_page_is_sent_at_once_and_only_once() {
        let all = |block: usize| (0..PAGES[block]).map(|page| (block, page)).collect();
        let ram = Ram {
            full: [(0, 2), (1, 1), (1, 6), (1, 3 * HUGE), (1, 3 * HUGE + 7)],
            // The last share is repeated, as if a page had been written last.
            shares: Mutex::new(vec![all(1), all(1), vec![(1, 6)]]),
        };
        let received = connected(&ram, |connection, mut there| {
            thread::scope(|scope| {
                let receiving = scope.spawn(move || {
                    let mut received = Vec::new();
                    there.read_to_end(&mut received).map(|_| received)
                });
                let order = &connection.ledger.order;
                // A zero page, a small one, and an unreadable one.
                for (block, page) in [(1, HUGE), (0, 2), (1, 3 * HUGE)] {
                    order.change(|order| order.ask(block, page, Instant::now()));
                }
                order.change(RequestQueue::end);
                connection.answer_all();
                let background =
                    thread::scope(|scope| connection.send_background(scope, "send_", 4));
                assert!(background.unwrap(), "{:?}", connection.take_failure());
                connection.close();
                receiving.join().unwrap().unwrap()
            })
        });
        let huge = |number: usize, full: &[usize]| {
            let pages = number * HUGE..(number + 1) * HUGE;
            let (full, zero): (Vec<_>, Vec<_>) = pages.partition(|page| full.contains(page));
            let zero = zero.into_iter().map(|page| ((1, page), true));
            zero.chain(full.into_iter().map(|page| ((1, page), false)))
                .collect::<Vec<_>>()
        };
        let expected = [huge(1, &[]), vec![((0, 2), false)], huge(0, &[1, 6])];
        assert_eq!(pages_of(&received), expected.concat());
    }

    #[test]
    fn the_end_is_not_sent_before_the_destination_reads_the_preempt_channel() {
        let ram = Ram {
            full: [(0, 1); 5],
            shares: Mutex::default(),
        };
        connected(&ram, |connection, mut main| {
            // The stream's opening.
            let mut opening = vec![0; 1 << 16];
            let read = main.read(&mut opening).unwrap();
            assert!(pages_of(&opening[..read]).is_empty());

            let (preempt, there) = Stream::pair().unwrap();
            connection.answer_on(preempt, false);
            thread::scope(|scope| {
                let ending = scope.spawn(|| {
                    connection.wait_for_reader()?;
                    connection.end()
                });
                // No page was requested, so the first page is sent, which is zero.
                assert!(there.wait_readable(FINAL_STATEMENT_TIMEOUT).unwrap());
                assert!(!main.wait_readable(Duration::from_millis(100)).unwrap());
                let read = there.read_some(&mut opening).unwrap();
                assert!((1..PAGE_SIZE).contains(&read));
                assert!(main.wait_readable(FINAL_STATEMENT_TIMEOUT).unwrap());
                connection.answers.end();
                ending.join().unwrap().unwrap_err();
            });
            assert!(connection.ledger.is_sent(0, 0));
        });
    }
}
