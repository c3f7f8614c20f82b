//! Runs one migration through the relay, from start to end: its connections and its threads.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use hotlift_net::admission::Listener;
use hotlift_net::transport::Stream;
use hotlift_wire::handshake::Features;
use hotlift_wire::multifd::{self, HEADER_LEN, Hello, Method, PacketLayout, ZeroPageDetection};

use crate::ends::request::{Outgoing, Request};
use crate::ends::stream_sink;
use crate::ends::stream_sink::{SourceFacts, SyncPoints, version_of};
use crate::ends::stream_source::accept::{Channels, QemuConnections, SETTLE};
use crate::ends::stream_source::candidates::NO_PREEMPT;
use crate::ends::stream_source::main_reader::{LateConnections, MainReader};
use crate::ends::stream_source::pass_through::{self, PassedThroughSource};
use crate::ends::stream_source::pending_requests::PendingRequests;
use crate::ends::stream_source::read_setup::{StreamSetup, other_devices, read_setup};
use crate::ends::stream_source::receive::Streams;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::MigrationError;
use crate::figures::Counters;
use crate::options::CHANNEL_MEMORY;
use crate::pipe::hooks::SourceStream;
use crate::pipe::run::run_threads;
use crate::pipe::session::{Relayed, Session, WaitCheck};
use crate::pipe::sink::Opening;
use crate::pipe::stream_in::StreamIn;
use crate::postcopy::LARGEST_PAGE;
use crate::stream::graceful_close;
use crate::stream::handshake;
use crate::stream::main_channel::{MainChannel, SilenceLimit, StreamConsumer};
use crate::stream::main_recv::{MainInput, WaitCondition};
use crate::stream::multifd_recv::Methods;

/// Time limit for a source's first packet with pages, once all of its channels are connected.
const FIRST_PAGES: Duration = Duration::from_secs(1);

/// Maximum count of packets that are searched for the first page: a barrier or two may precede it.
const FIRST_PACKETS: usize = 3;

/// Maximum count of a channel's huge pages that have partly arrived: one that is being sent, and others whose batches are being
/// written.
const HUGE_PAGES: usize = 8;

/// Poll interval of the wait for the first page.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Accepts a source at `listener`, and forwards its stream.
pub(crate) fn run(listener: &Listener, request: Request<'_>) -> Result<Relayed, MigrationError> {
    let mut arrivals = QemuConnections::new(listener, request.settings, request.control)?;
    let (main, since) = arrivals.main(&WaitCheck::early(request.control))?;
    pass_on(main, arrivals, since, request)
}

/// Runs one migration of the source whose main channel is `main`.
fn pass_on(
    main: Stream,
    mut arrivals: QemuConnections<'_>,
    since: Instant,
    request: Request<'_>,
) -> Result<Relayed, MigrationError> {
    let Request {
        settings,
        control,
        hooks,
        ..
    } = request;
    let early = WaitCheck::early(control);
    let memory = settings.limits.memory(0);
    let id = handshake::new_id().map_err(MigrationError::opening)?;
    control.set_id(id);
    // The bytes of the set-up are counted again below, once the number of channels is known.
    let unbooked = Counters::default();
    // The silence timeout does not apply to a source that the caller monitors. QEMU can take a minute to start the dirty log of
    // a large VM, or on a busy host, and sends nothing in that time.
    let silence = match hooks.ownership {
        Some(_) => SilenceLimit::Unlimited,
        None => SilenceLimit::Always(settings.limits.handshake_timeout),
    };
    let mut input = MainInput::new(&main, &unbooked, &memory, control.life())?.keep_everything();
    let into_stream = matches!(request.outgoing, Outgoing::Address(_));
    let mut machine = MainChannel::new(StreamConsumer::Relay { into_stream }, silence);
    let pass_through = |arrivals, input: &MainInput<'_>, preempt, why, is_answered| {
        let source = PassedThroughSource {
            main: input.socket(),
            first_bytes: input.everything(),
            preempt,
            why,
            is_answered,
        };
        pass_through::run(arrivals, source, request, since)
    };
    let stream_setup = read_setup(&mut input, &mut machine, id, &early)?;
    let mut setup = match stream_setup {
        StreamSetup::PageByPage(setup) => setup,
        StreamSetup::PassThrough(why, is_answered) => {
            return pass_through(arrivals, &input, None, why, is_answered);
        }
    };
    if setup.postcopy
        && setup.relay.is_none()
        && version_of(&setup.configuration).is_some_and(|version| version <= (7, 2))
        // QEMU makes the preempt connection in parallel with main, and sends nothing on it at first.
        && let preempt @ Some(_) = arrivals.another(input.socket(), SETTLE, Some(&early))?
    {
        let why = "postcopy may follow, with a preempt channel from the beginning (machine types up to 7.2)";
        let why = why.to_owned();
        return pass_through(arrivals, &input, preempt, why, setup.return_path);
    }
    let multifd = setup
        .relay
        .map(|features| features.contains(Features::MULTIFD));
    let expected = setup.flush || multifd == Some(true);
    let channels = match multifd {
        Some(false) => None,
        _ => arrivals.channels(input.socket(), expected, &early)?,
    };
    machine.begin(channels.is_some());
    match other_devices(&mut input, &mut machine, &mut setup, &early) {
        Ok(None) => {}
        Ok(Some(why)) => return pass_through(arrivals, &input, None, why, setup.return_path),
        Err(error) => {
            if let (Some(it), None) = (&channels, setup.relay) {
                graceful_close::leave_qemu(&main, &it.channels);
            }
            return Err(error);
        }
    }
    let stated = channels.as_ref().map(|channels| channels.uuid);
    let opening = Opening {
        configuration: &setup.configuration,
        uuid: settings
            .uuid
            .or(stated)
            .or(setup.configuration.uuid)
            .unwrap_or_default(),
        commands: &setup.commands,
        early: &setup.early,
        ram: &setup.ram,
    };
    let hello = channels.as_ref().and_then(|channels| channels.hello);
    if let Some(error) = hello.and_then(unfit) {
        graceful_close::refuse(&[&main], &error);
        return Err(error);
    }
    let facts = SourceFacts {
        sync_points: channels.as_ref().map(|_| SyncPoints {
            each_section: !setup.flush,
            are_shown: setup
                .relay
                .is_none_or(|features| features.contains(Features::SYNC_POINTS_SHOWN)),
        }),
        zeros_were_detected: hello
            .is_some_and(|hello| hello.zero_page_detection != ZeroPageDetection::None),
        is_guest: false,
        preempts: false,
    };
    let multifd = channels.map_or_else(Vec::new, |Channels { channels, .. }| channels);
    memory.raise(multifd.len() * CHANNEL_MEMORY);
    if setup.postcopy && setup.ram.has_huge_pages() {
        memory.raise((multifd.len() + 1) * HUGE_PAGES * LARGEST_PAGE);
    }
    let open = || {
        if let Some(on_source) = hooks.on_source {
            let method = match setup.relay {
                Some(_) => Method::None,
                None => first_method(&multifd, &early)?,
            };
            on_source(&SourceStream {
                // Channel ids are bytes.
                channels: u8::try_from(multifd.len()).unwrap_or(u8::MAX),
                method: method.name(),
            });
        }
        stream_sink::open(request, facts, opening, &memory)
    };
    let sink = match open() {
        Ok(sink) => sink,
        Err(error) => {
            match setup.relay {
                Some(_) => graceful_close::refuse(&[&main], &error),
                None => graceful_close::leave_qemu(&main, &multifd),
            }
            return Err(error);
        }
    };
    let received = Counters::of_side(multifd.len());
    if let Some(on_main) = received.last() {
        on_main.add_bytes(input.everything().len());
    }
    let read_ahead = input.detach();
    let takes_activity = setup
        .relay
        .is_some_and(|features| features.contains(Features::GUEST_ACTIVITY));
    // A relay may select another method for each packet.
    let methods = match setup.relay {
        Some(_) => Methods::Each,
        None => Methods::First,
    };
    let source = StreamIn::new(main, multifd, setup.relay.is_some(), hello, methods);
    let kinds = (setup.is_guest(), takes_activity, setup.return_path);
    let pending_requests = PendingRequests::new(&setup.ram.blocks, &memory, request.control.life());
    if setup.postcopy {
        pending_requests.reserve()?;
    }
    let upstream = Upstream::new(source, kinds, pending_requests);
    let session = Session::new(
        request.control,
        request.settings,
        memory,
        &*sink,
        received,
        since,
        id,
    );
    let input = MainInput::attach(
        read_ahead,
        &upstream.source.main,
        &session.received[upstream.source.multifd.len()],
    );
    let mut reader = MainReader::new(&session, &upstream, &setup, input, machine);
    // A relay as destination announces its count of channels, and its source may query the outcome. A QEMU does neither.
    let mut accept_loop = None;
    let mut uncounted = None;
    match upstream.source.is_hotlift() {
        true => accept_loop = Some(arrivals.into_accept_loop()),
        false => uncounted = Some(arrivals),
    }
    let further = Connections {
        arrivals: RefCell::new(uncounted),
        upstream: &upstream,
        uuid: stated,
        postcopy: setup.postcopy,
        is_secured: settings.incoming_tls.is_some(),
        session: &session,
    };
    run_threads(
        &session,
        &Streams::new(&upstream, &setup),
        &setup.ram.blocks,
        hooks,
        &mut || reader.run(opening, hooks, &further),
        accept_loop,
    )?;
    Ok(session.relayed(&setup.configuration.machine))
}

/// Accepts connections that may arrive while a relay reads a QEMU's main channel.
struct Connections<'a, 'l> {
    /// `None` if the source is a relay, because a relay announces the count of its connections in advance.
    arrivals: RefCell<Option<QemuConnections<'l>>>,
    upstream: &'a Upstream,
    uuid: Option<[u8; 16]>,
    postcopy: bool,
    /// True over TLS. The source then waits for the handshake of its preempt connection before it continues precopy.
    is_secured: bool,
    session: &'a Session<'a>,
}

impl<'l> Connections<'_, 'l> {
    fn take(
        &self,
        take_one: impl Fn(&mut QemuConnections<'l>) -> Result<Option<Stream>, MigrationError>,
    ) {
        let preempt = &self.upstream.preempt;
        if let Some(arrivals) = self.arrivals.borrow_mut().as_mut()
            && self.postcopy
            && !preempt.is_found()
        {
            // An error of accept is ignored: the source waits, and reports that to its client.
            while let Ok(Some(stream)) = take_one(arrivals) {
                // The preempt connection is silent until the guest runs at the destination.
                let is_silent = matches!(stream.wait_readable(Duration::ZERO), Ok(false));
                let may_be = !stream.is_hung_up() && (is_silent || self.session.may_run_there());
                if !(may_be && preempt.add(stream)) {
                    self.session.control.rejections().reject(NO_PREEMPT);
                }
            }
        }
    }
}

impl LateConnections for Connections<'_, '_> {
    fn preempt(&self, switched: bool) {
        if self.is_secured || switched {
            let main = &self.upstream.source.main;
            self.take(|arrivals| arrivals.another(main, Duration::ZERO, None));
        }
    }

    fn preempt_for_sure(&self) -> bool {
        let call = self.session.call();
        let main = &self.upstream.source.main;
        let preempt = &self.upstream.preempt;
        self.take(|arrivals| {
            // If a candidate has connected, the handshake of another client must not delay the guest.
            let call = Some(&call).filter(|_| !preempt.is_any());
            arrivals.another(main, Duration::ZERO, call)
        });
        preempt.is_any()
    }

    fn late_channel(&self) -> bool {
        let mut arrivals = self.arrivals.borrow_mut();
        let count = self.upstream.source.multifd.len();
        let arrivals = arrivals.as_mut();
        arrivals.is_some_and(|arrivals| arrivals.late_channel(self.uuid, count))
    }
}

/// Returns the method of a source's packets. Reads it, without consuming data, from the first packet with pages. Returns
/// [`Method::None`] if no such packet arrives within [`FIRST_PAGES`].
fn first_method(channels: &[Stream], call: &WaitCheck<'_>) -> Result<Method, MigrationError> {
    let deadline = Instant::now() + FIRST_PAGES;
    let mut seen = vec![0; FIRST_PACKETS * HEADER_LEN];
    while !channels.is_empty() && Instant::now() < deadline {
        for channel in channels {
            // An error of the channel is ignored here: it occurs again when the channel is read.
            let length = channel.peek(&mut seen).ok().flatten().unwrap_or(0);
            if let Some(method) = multifd::first_method(&seen[..length]) {
                return Ok(method);
            }
        }
        call.check()?;
        // A poll would return at once, because unread data has arrived.
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(Method::None)
}

/// Returns the reason why a relay cannot process the packets that a Hotlift announces in `hello`. Returns `None` if it can.
fn unfit(hello: Hello) -> Option<MigrationError> {
    let size = |layout: PacketLayout| format!("{} bytes", layout.pages() * layout.page_size());
    (hello.layout != PacketLayout::QEMU).then(|| MigrationError::Mismatch {
        what: "multifd-packet-size".to_owned(),
        source_has: size(hello.layout),
        destination_has: format!("{}: it is a relay", size(PacketLayout::QEMU)),
    })
}
