//! The connections to a source, as the source of pages for a guest of this process.

use std::net::Shutdown;

use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;

use crate::ends::guest_sink::sink::GuestSink;
use crate::ends::guest_sink::{channel, decompress_threads};
use crate::error::MigrationError;
use crate::handover::DestinationSide;
use crate::lock::lock;
use crate::pipe::session::Session;
use crate::pipe::source::Source;
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::graceful_close;
use crate::stream::serve_queries::linger;

/// Connections of an incoming guest's migration.
pub(crate) struct GuestConnections<'a>(pub &'a GuestSink<'a>);

impl Source for GuestConnections<'_> {
    fn readers(&self) -> usize {
        self.0.source.multifd.len() + decompress_threads::threads(self.0.options)
    }

    fn thread_name(&self, reader: usize) -> String {
        match reader.checked_sub(self.0.source.multifd.len()) {
            None => format!("mig/dst/recv_{reader}"),
            Some(number) => format!("decompress_{number}"),
        }
    }

    fn name(&self, thread: &str) -> String {
        format!("mig/dst/{thread}")
    }

    fn read(&self, session: &Session<'_>, reader: usize) -> Result<(), MigrationError> {
        let sink = self.0;
        if reader >= sink.source.multifd.len() {
            return decompress_threads::work(&sink.decompress, sink.target());
        }
        // Ids range from 0 to 254.
        let id = u8::try_from(reader).unwrap_or(u8::MAX);
        let outcome = channel::receive(session, sink, id);
        // After everything is loaded, the loss of a channel is no failure: the source's commit can arrive on another channel.
        let is_loading = session.destination_handover.side() == DestinationSide::Loading;
        session.destination_handover.connection_ended();
        if is_loading { outcome } else { Ok(()) }
    }

    fn accept_late(
        &self,
        _: &Session<'_>,
        accept_loop: &mut AcceptLoop<'_>,
        arrivals: &mut Vec<Admitted>,
    ) {
        self.0.accept_preempt(accept_loop, arrivals);
    }

    fn streams(&self) -> Vec<&Stream> {
        self.0.source.streams().collect()
    }

    fn free_readers(&self, session: &Session<'_>) {
        self.0.source.free_readers(session);
    }

    fn shut_down(&self) {
        self.0.preempt.end();
        self.0.source.main.shutdown(Shutdown::Both);
        self.0.source.shut_channels();
    }

    fn refuse(&self, session: &Session<'_>, reason: &str) {
        let source = &self.0.source;
        if source.is_hotlift() && session.destination_handover.side() == DestinationSide::Never {
            graceful_close::send_reason(&[&source.main], reason);
        }
    }

    fn linger(&self, session: &Session<'_>, accept_loop: &mut AcceptLoop<'_>) {
        let source = &self.0.source;
        if source.is_hotlift() {
            let recovered = lock(&self.0.recovered).clone();
            let streams: Vec<_> = source.streams().chain(recovered.as_deref()).collect();
            linger(
                accept_loop,
                &session.query_subject(&|| ()),
                &streams,
                &lock(&self.0.read_ahead),
                session.query_period,
                session.control.life(),
            );
        }
    }

    fn over(&self, session: &Session<'_>) {
        self.0.source.leave(session);
        graceful_close::close(&[&self.0.source.main]);
        self.shut_down();
    }
}
