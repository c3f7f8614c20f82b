//! Connections to the destination of a migration, and the destination's answers on them.

use std::sync::Arc;
use std::time::Duration;

use hotlift_net::admission::ConnectionToken;
use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::Configuration;

use crate::control::Control;
use crate::error::MigrationError;
use crate::figures::Counts;
use crate::options::StreamOptions;
use crate::postcopy::priority_lock::PriorityLock;
use crate::remote::Remote;
use crate::stream::main_send::{MainLink, MainSend};
use crate::stream::multifd_send::{ChannelOpening, MultifdSend, connect};
use crate::stream::return_path::Answers;

/// Main channel and multifd channels to a destination.
pub(crate) struct StreamOut {
    /// Address of the destination.
    pub to: Remote,
    pub link: Arc<MainLink>,
    pub main: PriorityLock<MainSend>,
    pub multifd: MultifdSend,
    pub answers: Answers,
}

impl StreamOut {
    /// Connects to `to`, and opens the multifd channels. Nothing is sent on main yet.
    pub(crate) fn connect(
        to: Remote,
        pass: Option<&ConnectionToken>,
        opening: &ChannelOpening,
        configuration: &Configuration,
        (options, timeout): (&StreamOptions, Duration),
        control: &Control,
    ) -> Result<Self, MigrationError> {
        let (main, multifd) = connect(&to, pass, opening, timeout, &control.dialing())?;
        let pacer = control.steering().pacer(options);
        let multifd = MultifdSend::new(multifd, &opening.hello, control.sending(options, &pacer));
        let link = Arc::new(MainLink {
            transport: main,
            counters: Arc::default(),
            pacer,
            life: control.life().clone(),
        });
        let main = MainSend::new(Arc::clone(&link), configuration)?;
        Ok(Self {
            to,
            link,
            main: PriorityLock::new(main),
            multifd,
            answers: Answers::new(control.life()),
        })
    }

    /// Iterates over all connections, the main channel first.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.link.transport).chain(self.multifd.sockets())
    }

    /// Returns the sum of the counters of all connections.
    pub(crate) fn counts(&self) -> Counts {
        let main = self.link.counters.read();
        [self.multifd.counts(), main].into_iter().sum()
    }
}
